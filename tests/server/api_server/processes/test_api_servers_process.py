"""Several API servers before one engine process, as the command starts them: they answer as one, and one may die."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from support.server.certificates import signed_by_itself
from support.server.engine_processes import COMMAND, PATIENCE, until
from support.server.processes import children, files_of
from support.server.running_servers import is_refused, serving

OPTIONS = ("--mode", "eager", "--warmup", "1,8", "--kv-memory", "20000 tokens")
SEVERAL = ("--api-server-count", "3")
TEXT = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}

pytestmark = pytest.mark.whole


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(url + path, verify=False)


def ready(url: str) -> bool:
    return get(url, "/ready").status_code == 200


def figures(url: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in get(url, "/metrics").text.splitlines() if line[0] != "#")
    return {name: float(value) for name, _, value in lines}


def answered(url: str) -> float:
    return figures(url).get('compiled_llm_http_requests_total{path="/v1/completions",status="200"}', 0.0)


def api_servers_of(pid: int) -> list[int]:
    return [child for child in children(pid) if Path(f"/proc/{child}/cmdline").read_bytes().endswith(b"API server\0")]


def sockets(pid: int) -> int:
    return sum(name.startswith("socket:") for name in files_of(pid))


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def assert_is_free(url: str) -> None:
    with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
        pass


def texts(url: str) -> list[str]:
    """Many answers at once, each over a connection of its own."""

    def text(number: int) -> str:
        body = {"prompt": [3 + number, 5, 3 + 2 * number], "max_tokens": 30, "temperature": 0}
        answer = httpx.post(url + TEXT, json=body, timeout=PATIENCE, verify=False)
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["choices"][0]["text"]
        return found

    with ThreadPoolExecutor(24) as pool:
        return list(pool.map(text, range(24)))


class Stream:
    """A stream that a thread reads to its end."""

    def __init__(self, url: str, body: object) -> None:
        self.began, self.last = threading.Event(), ""
        self._thread = threading.Thread(target=self._read, args=(url, body), daemon=True)
        self._thread.start()
        assert self.began.wait(PATIENCE)

    def _read(self, url: str, body: object) -> None:
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", url + TEXT, json=body, timeout=PATIENCE, verify=False) as response,
        ):
            for line in filter(None, response.iter_lines()):
                self.last = line
                self.began.set()

    def end(self) -> str:
        """Its last line."""
        self._thread.join(PATIENCE)
        return self.last


@pytest.fixture(scope="module")
def three(model_folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with three API servers, for tests that leave it as it was."""
    with serving(model_folder, *OPTIONS, *SEVERAL) as (process, url):
        until(lambda: ready(url))
        yield process, url
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_three_api_servers_say_what_one_says_and_count_together(
    model_folder: Path, three: tuple[subprocess.Popen[str], str]
) -> None:
    with serving(model_folder, *OPTIONS, "--api-server-count", "1") as (process, url):
        until(lambda: ready(url))
        assert not api_servers_of(process.pid)
        expected = texts(url)
    url = three[1]
    before = answered(url)
    assert texts(url) == expected
    until(lambda: answered(url) == before + 24)
    assert {answered(url) for _ in range(6)} == {before + 24}, "whichever API server is asked"
    assert {get(url, "/v1/models").text for _ in range(6)} == {get(url, "/v1/models").text}


def test_connections_are_spread_evenly(three: tuple[subprocess.Popen[str], str]) -> None:
    process, url = three
    api_servers = api_servers_of(process.pid)
    until(lambda: len({sockets(api_server) for api_server in api_servers}) == 1)
    before = sockets(api_servers[0])
    with ExitStack() as stack:
        for _ in range(12):
            client = stack.enter_context(httpx.Client(timeout=PATIENCE, verify=False))
            assert client.get(f"{url}/health").status_code == 200
        assert [sockets(api_server) - before for api_server in api_servers] == [4, 4, 4]
    until(lambda: [sockets(api_server) - before for api_server in api_servers] == [0, 0, 0])


def test_an_api_server_that_is_killed_under_load_ends_its_own_streams_alone(
    three: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = three
    before, counted = api_servers_of(process.pid), answered(url)
    streams = [Stream(url, LONG) for _ in range(9)]
    os.kill(before[1], signal.SIGKILL)
    assert sorted(stream.end() == "data: [DONE]" for stream in streams) == [False] * 3 + [True] * 6
    until(lambda: len(set(api_servers_of(process.pid)) - {before[1]}) == 3)
    until(lambda: figures(url)["compiled_llm_connections"] == 3.0)
    until(lambda: figures(url)["compiled_llm_http_open"] == 1.0)
    until(lambda: answered(url) == counted + 6)  # what the one that was killed had answered before is counted still
    assert figures(url)["compiled_llm_running"] == 0.0
    assert figures(url)['compiled_llm_pages{state="used"}'] == 0.0
    assert len(texts(url)) == 24


def test_an_engine_process_that_is_killed_is_replaced_for_all_api_servers(
    three: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = three
    streams = [Stream(url, LONG) for _ in range(6)]
    (engine_process,) = set(children(process.pid)) - set(api_servers_of(process.pid))
    os.kill(engine_process, signal.SIGKILL)
    assert all('"code":"engine_dead"' in stream.end() for stream in streams)
    until(lambda: not ready(url) or engine_process not in children(process.pid))
    until(lambda: ready(url))
    assert len(texts(url)) == 24, "all API servers answer as soon as one says that it is ready"


def test_it_drains_and_the_second_signal_ends_requests(model_folder: Path) -> None:
    for seconds in ("30", "1"):
        with serving(model_folder, *OPTIONS, *SEVERAL, "--drain-seconds", seconds) as (process, url):
            until(lambda url=url: ready(url))
            left = [process.pid, *children(process.pid)]
            lasting = {**LONG, "max_tokens": 1000, "n": 8 if seconds == "1" else 3}
            streams = [Stream(url, lasting) for _ in range(3)]
            process.send_signal(signal.SIGTERM)
            until(lambda url=url: is_refused(url))
            assert api_servers_of(process.pid), "the port is free before the last request has ended"
            assert_is_free(url)
            ends = [stream.end() for stream in streams]
            assert process.wait(PATIENCE) == 0
            assert (set(ends) == {"data: [DONE]"}) == (seconds == "30")
            until(lambda left=left: all(is_gone(pid) for pid in left[1:]))


def test_ctrl_c_twice_ends_them_at_once_and_shows_no_traceback(model_folder: Path) -> None:
    with serving(model_folder, *OPTIONS, *SEVERAL) as (process, url):
        until(lambda: ready(url))
        streams = [Stream(url, {**LONG, "max_tokens": 1000, "n": 8}) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert all(stream.end() != "data: [DONE]" for stream in streams)


def test_a_server_that_is_killed_leaves_neither_api_servers_nor_engine_process_nor_port(model_folder: Path) -> None:
    with serving(model_folder, *OPTIONS, *SEVERAL) as (process, url):
        until(lambda: ready(url))
        left = children(process.pid)
        assert len(left) == 4
        Stream(url, {**LONG, "n": 8})
        process.kill()
        process.wait()
        assert_is_free(url)
        until(lambda: all(is_gone(pid) for pid in left))


def test_api_servers_that_die_too_often_end_the_server(model_folder: Path) -> None:
    with serving(model_folder, *OPTIONS, *SEVERAL) as (process, url):
        until(lambda: ready(url))
        for _ in range(4):
            killed = api_servers_of(process.pid)[0]
            os.kill(killed, signal.SIGKILL)
            until(
                lambda killed=killed: (
                    len(set(api_servers_of(process.pid)) - {killed}) == 3 or process.poll() is not None
                )
            )
        assert process.wait(PATIENCE) == 1


def test_https_and_keys_with_several_api_servers(model_folder: Path, tmp_path: Path) -> None:
    certificate, key = signed_by_itself(tmp_path)
    (tmp_path / "keys").write_text("a-key-of-sixteen-or-more")
    options = ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--api-key-file", str(tmp_path / "keys")]
    bearer = {"authorization": "Bearer a-key-of-sixteen-or-more"}
    arguments = [COMMAND, "serve", str(model_folder), "--port", "0", *OPTIONS, *SEVERAL, *options]
    log = tmp_path / "log"
    with log.open("w") as stderr, subprocess.Popen(arguments, stderr=stderr) as process:
        try:
            until(lambda: " at https://" in log.read_text())
            url = re.findall(r"at (https://\S+)/v1", log.read_text())[0]
            until(lambda: ready(url))
            api_servers = api_servers_of(process.pid)
            until(lambda: len({sockets(api_server) for api_server in api_servers}) == 1)
            before = sockets(api_servers[0])
            for _ in range(4):
                with pytest.raises(httpx.TransportError):
                    httpx.get(url.replace("https", "http") + "/health", timeout=PATIENCE)
            assert get(url, "/v1/models").status_code == 401
            answers = [httpx.get(f"{url}/v1/models", headers=bearer, verify=False).status_code for _ in range(4)]
            assert answers == [200] * 4
            until(lambda: [sockets(api_server) - before for api_server in api_servers] == [0, 0, 0])
            with ExitStack() as stack:  # those that have failed are not counted as open
                for _ in range(6):
                    client = stack.enter_context(httpx.Client(timeout=PATIENCE, verify=False))
                    assert client.get(f"{url}/health").status_code == 200
                assert [sockets(api_server) - before for api_server in api_servers] == [2, 2, 2]
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


BROKEN = """
import sys
from compiled_llm.__main__ import main
from compiled_llm.server.processes import worker_process
worker_process._COMMAND = (sys.executable, "-c", "raise SystemExit(3)")
main()
"""


def test_api_servers_that_cannot_begin_end_the_server(model_folder: Path) -> None:
    command = [sys.executable, "-c", BROKEN, "serve", str(model_folder), "--port", "0", *OPTIONS, *SEVERAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert "error: serve: an API server has ended before it took connections (exit code 3)" in done.stderr
