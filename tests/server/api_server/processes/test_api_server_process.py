"""Real processes: a server whose engine process is stopped, and what it leaves on the machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from support.server.engine_processes import COMMAND, PATIENCE, until
from support.server.running_servers import is_refused, serving
from support.server.under_load import OPTIONS, TEXT, Stream, get, is_ready

pytestmark = pytest.mark.whole


def engine_processes(socket: str) -> list[int]:
    """The processes of engine processes that listen at a path."""
    found = subprocess.run(
        ["pgrep", "-f", "--", f"--uds {socket} --leashed"], capture_output=True, text=True, check=False
    )
    return [int(number) for number in found.stdout.split()]


def test_the_next_api_server_removes_what_a_killed_one_has_left(
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
def test_an_engine_process_that_does_not_end_is_ended_by_the_second_ctrl_c(
    model_folder: Path, path: Path, seconds: int
) -> None:
    command = (sys.executable, "-c", PATIENT)
    with serving(model_folder, "--uds", str(path), *OPTIONS, command=command) as (process, url):
        until(lambda: is_ready(url))
        (engine_process,) = engine_processes(str(path))
        os.kill(engine_process, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        until(lambda: is_refused(url))
        time.sleep(seconds)  # in one of them the API server has ended, and waits for its engine process
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        assert not engine_processes(str(path))


IMPATIENT = """
from compiled_llm.__main__ import main
from compiled_llm.server.openai.common import engine_link
engine_link._SILENT_SECONDS = 12
main()
"""


def test_an_engine_process_that_is_stopped_is_not_ready_and_not_killed(model_folder: Path, path: Path) -> None:
    command = (sys.executable, "-c", IMPATIENT)
    with serving(model_folder, "--uds", str(path), *OPTIONS, command=command) as (_, url):
        until(lambda: is_ready(url))
        (engine_process,) = engine_processes(str(path))
        running = Stream(url)
        os.kill(engine_process, signal.SIGSTOP)
        assert "has said nothing for 12 s" in running.end()
        assert httpx.get(f"{url}/ready").json()["ready"] is False
        os.kill(engine_process, signal.SIGCONT)
        until(lambda: is_ready(url))
        assert httpx.post(url + TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert engine_processes(str(path)) == [engine_process]


def test_an_engine_process_that_reads_nothing_keeps_no_event_loop_waiting(model_folder: Path, path: Path) -> None:
    long = {"prompt": [3, 300] * 400, "max_tokens": 1}
    with serving(model_folder, "--uds", str(path), *OPTIONS) as (_, url), ThreadPoolExecutor(200) as pool:
        until(lambda: is_ready(url))
        (engine_process,) = engine_processes(str(path))
        os.kill(engine_process, signal.SIGSTOP)
        asked = [pool.submit(httpx.post, url + TEXT, json=long, timeout=PATIENCE) for _ in range(200)]
        until(lambda: "compiled_llm_http_open 201.0" in httpx.get(f"{url}/metrics", timeout=PATIENCE).text)
        assert get(url, "/health").status_code == 200
        os.kill(engine_process, signal.SIGCONT)
        assert {request.result().status_code for request in asked} == {200}


def test_the_second_ctrl_c_ends_requests_and_shows_no_traceback(model_folder: Path, tmp_path: Path) -> None:
    arguments = [COMMAND, "serve", str(model_folder), "--port", "0", *OPTIONS]
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(arguments, stderr=stderr, start_new_session=True) as process,
    ):
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
