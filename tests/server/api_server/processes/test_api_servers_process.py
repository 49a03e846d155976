"""Servers as the command starts them: several API servers answer as one, and signals end all processes."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from support.server.certificates import signed_by_itself
from support.server.engine_processes import COMMAND, PATIENCE, until
from support.server.processes import files_of
from support.server.running_servers import is_refused, serving
from support.server.under_load import (
    OPTIONS,
    TEXT,
    Stream,
    answered,
    api_servers_of,
    figures,
    get,
    is_gone,
    is_ready,
    served,
    texts,
)

SEVERAL = ("--api-server-count", "3")

pytestmark = pytest.mark.whole


def sockets(pid: int) -> int:
    return sum(name.startswith("socket:") for name in files_of(pid))


@pytest.fixture(scope="module")
def three(model_folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with three API servers, for tests that leave it as it was."""
    with serving(model_folder, *OPTIONS, *SEVERAL) as (process, url):
        until(lambda: is_ready(url))
        yield process, url
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_three_api_servers_answer_and_count_as_one(
    model_folder: Path, three: tuple[subprocess.Popen[str], str]
) -> None:
    with serving(model_folder, *OPTIONS, "--api-server-count", "1") as (process, url):
        until(lambda: is_ready(url))
        assert not api_servers_of(process.pid)
        expected = texts(url)
    url = three[1]
    before = answered(url)
    assert texts(url) == expected
    until(lambda: answered(url) == before + 24)
    assert {answered(url) for _ in range(6)} == {before + 24}, "whichever API server is asked"
    assert {get(url, "/v1/models").text for _ in range(6)} == {get(url, "/v1/models").text}


def assert_spread(url: str, api_servers: list[int], before: int, each: int) -> None:
    """New connections go to the API servers in turn, so many to each of three."""
    with ExitStack() as stack:
        for _ in range(3 * each):
            client = stack.enter_context(httpx.Client(timeout=PATIENCE, verify=False))
            assert client.get(f"{url}/health").status_code == 200
        assert [sockets(api_server) - before for api_server in api_servers] == [each] * 3


def test_connections_are_spread_evenly(three: tuple[subprocess.Popen[str], str]) -> None:
    process, url = three
    api_servers = api_servers_of(process.pid)
    until(lambda: len({sockets(api_server) for api_server in api_servers}) == 1)
    before = sockets(api_servers[0])
    assert_spread(url, api_servers, before, 4)
    until(lambda: [sockets(api_server) - before for api_server in api_servers] == [0, 0, 0])


def test_https_and_keys_with_several_api_servers(model_folder: Path, tmp_path: Path) -> None:
    certificate, key = signed_by_itself(tmp_path)
    (tmp_path / "keys").write_text("a-key-of-sixteen-or-more")
    options = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--api-key-file", str(tmp_path / "keys"))
    bearer = {"authorization": "Bearer a-key-of-sixteen-or-more"}
    with serving(model_folder, *OPTIONS, *SEVERAL, *options) as (process, url):
        until(lambda: is_ready(url))
        api_servers = api_servers_of(process.pid)
        until(lambda: len({sockets(api_server) for api_server in api_servers}) == 1)
        before = sockets(api_servers[0])
        for _ in range(4):
            with pytest.raises(httpx.TransportError):
                httpx.get(url.replace("https", "http") + "/health", timeout=PATIENCE)
        assert get(url, "/v1/models").status_code == 401
        answers = [httpx.get(f"{url}/v1/models", headers=bearer, verify=False).status_code for _ in range(4)]
        assert answers == [200] * 4
        # Those that have failed are not counted as open.
        until(lambda: [sockets(api_server) - before for api_server in api_servers] == [0, 0, 0])
        assert_spread(url, api_servers, before, 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


BROKEN = """
import sys
from compiled_llm.__main__ import main
from compiled_llm.server.processes import worker_process
worker_process.own_command = lambda *_: (sys.executable, "-c", "raise SystemExit(3)")
main()
"""


def test_api_servers_that_cannot_begin_end_the_server(model_folder: Path) -> None:
    command = [sys.executable, "-c", BROKEN, "serve", str(model_folder), "--port", "0", *OPTIONS, *SEVERAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert "error: serve: an API server has ended before it took connections (exit code 3)" in done.stderr


def test_the_next_server_removes_what_a_killed_one_left(
    model_folder: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(folder))

    def sockets() -> list[Path]:
        return sorted(folder.glob("compiled-llm-*/engine"))

    with serving(model_folder, *OPTIONS) as (killed, url), serving(model_folder, *OPTIONS) as (lives, _):
        until(lambda: is_ready(url) and len(sockets()) == 2)
        killed.kill()
        killed.wait()
        with serving(model_folder, *OPTIONS) as (next_one, url):
            until(lambda: is_ready(url))
            assert len(list(folder.glob("compiled-llm-*"))) == 2, "that of the one that lives is still there"
            for process in (lives, next_one):
                process.send_signal(signal.SIGINT)
                assert process.wait(PATIENCE) == 0
    assert not list(folder.glob("compiled-llm-*"))


PATIENT = """
from compiled_llm.__main__ import main
from compiled_llm.server.engine_process import starter
starter._PATIENCE = 1e6
main()
"""


@pytest.mark.parametrize("seconds", [0, 1])
def test_the_second_ctrl_c_ends_an_engine_process_that_does_not(model_folder: Path, path: Path, seconds: int) -> None:
    with served(model_folder, path, 1, command=(sys.executable, "-c", PATIENT)) as server:
        process, url, engine_process = server.process, server.url, server.engine_process
        os.kill(engine_process, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        until(lambda: is_refused(url))
        time.sleep(seconds)  # in one of them the API server has ended, and waits for its engine process
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert is_gone(engine_process)


def test_the_second_ctrl_c_ends_requests_and_shows_no_traceback(model_folder: Path, tmp_path: Path) -> None:
    arguments = [COMMAND, "serve", str(model_folder), "--port", "0", *OPTIONS]
    log = tmp_path / "log"
    with log.open("w") as stderr, subprocess.Popen(arguments, stderr=stderr, start_new_session=True) as process:
        until(lambda: "compiled_llm: ready" in log.read_text())
        url = re.findall(r"at (http://\S+)/v1", log.read_text())[0]
        assert is_ready(url), "it says so once it is"
        Stream(url)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the engine process has it, too
        until(lambda: is_refused(url))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    assert "Traceback" not in log.read_text()
    assert "requests that may end first: 1; a second signal ends them" in log.read_text()


def test_a_port_that_is_taken_and_one_that_is_open_to_all(model_folder: Path) -> None:
    with serving(model_folder, *OPTIONS) as (_, url):
        arguments = [COMMAND, "serve", str(model_folder), "--port", url.rpartition(":")[2]]
        taken = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE)
        assert (taken.returncode, "cannot listen there: Address already in use" in taken.stderr) == (1, True)
        everywhere = subprocess.run([*arguments, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=PATIENCE)
        assert (everywhere.returncode, "give --api-key-file" in everywhere.stderr) == (2, True)


def test_half_requests_leave_room_for_others(model_folder: Path) -> None:
    limited = ("prlimit", "--nofile=64:120", COMMAND)  # room for 20 connections
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    def reached(condition: Callable[[], bool]) -> bool:
        with suppress(httpx.TransportError):  # there may be no room for it
            return condition()
        return False

    with (
        serving(model_folder, *OPTIONS, "--client-seconds", "1", command=limited) as (process, url),
        ExitStack() as peers,
    ):
        until(lambda: is_ready(url))
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (120, 120)
        for sent in (b"", b"G", head, head + b"Content-Length: 99\r\n\r\n{") * 15:
            peer = peers.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))))
            with suppress(OSError):  # it may have been refused by now
                peer.sendall(sent)
        body = {"prompt": "a", "max_tokens": 1}
        until(lambda: reached(lambda: httpx.post(url + TEXT, json=body, timeout=PATIENCE).status_code == 200))
        until(lambda: reached(lambda: figures(url)["compiled_llm_http_open"] == 1))
