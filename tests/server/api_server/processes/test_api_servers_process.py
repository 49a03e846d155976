"""Several API servers before one engine process, as the command starts them: they answer as one."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.server.certificates import signed_by_itself
from support.server.engine_processes import COMMAND, PATIENCE, until
from support.server.processes import files_of
from support.server.running_servers import serving
from support.server.under_load import OPTIONS, answered, api_servers_of, get, is_ready, texts

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


def test_three_api_servers_say_what_one_says_and_count_together(
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
worker_process.own_command = lambda *_: (sys.executable, "-c", "raise SystemExit(3)")
main()
"""


def test_api_servers_that_cannot_begin_end_the_server(model_folder: Path) -> None:
    command = [sys.executable, "-c", BROKEN, "serve", str(model_folder), "--port", "0", *OPTIONS, *SEVERAL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert "error: serve: an API server has ended before it took connections (exit code 3)" in done.stderr
