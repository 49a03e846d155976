"""Real processes end under load, however they do: each side hears of it, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import le
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from compiled_llm.client import Client, EngineDeadError
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.server.engine_process.process import DEVICE_LOST
from support.server.engine_processes import PATIENCE, started_engine_process, until
from support.server.planted_device_loss import SCRIPT
from support.server.processes import children, files_of, threads_of
from support.server.running_servers import is_refused
from support.server.under_load import (
    DONE,
    HTTP_CLIENT,
    LONG,
    OPTIONS,
    SOCKET_CLIENT,
    TEXT,
    Served,
    Stream,
    answered,
    assert_is_free,
    assert_nothing_is_left,
    get,
    is_gone,
    is_ready,
    kill_client,
    served,
    texts,
)

pytestmark = pytest.mark.whole

LOST = "the device has failed (an illegal memory access was encountered)"
CUT = ""
"""The last line of a stream whose server has gone is any but ``DONE``."""
ENDS = '"code":"server_ends"'


def kill_engine_process(server: Served) -> None:
    os.kill(server.engine_process, signal.SIGKILL)


def kill_engine_process_twice(server: Served) -> None:
    """The next one is killed while it loads."""
    killed = server.engine_process
    kill_engine_process(server)
    until(lambda: is_gone(killed) and children(server.process.pid))
    kill_engine_process(server)


def kill_api_server(server: Served) -> None:
    os.kill(server.api_servers[1], signal.SIGKILL)


def kill_server(server: Served) -> None:
    server.process.kill()


def lose_device(server: Served) -> None:
    (server.path.parent / "lose").touch()


def tell(*numbers: signal.Signals) -> Callable[[Served], None]:
    """Send signals, the next one once the last one was understood."""

    def send(server: Served) -> None:
        for number in numbers:
            server.process.send_signal(number)
            until(lambda: is_refused(server.url) if server.url else not server.path.exists())
            if server.url:
                assert_is_free(server.url)

    return send


def hurry(server: Served) -> None:
    """Press Ctrl-C again and again, whether it was understood or not."""
    for seconds in (0.0, 0.2, 0.0):
        server.process.send_signal(signal.SIGINT)
        time.sleep(seconds)


def kill_clients(server: Served) -> None:
    """Kill some again and again: their files and threads do not stay."""

    def held() -> list[int]:
        return [count for pid in (server.process.pid, server.engine_process) for count in held_by(pid)]

    for number in range(3):
        kill_client(SOCKET_CLIENT, str(server.path))
        if server.url:
            kill_client(HTTP_CLIENT, server.url + TEXT)
        if number == 0:
            before = held()
    until(lambda: all(now <= then + 1 for now, then in zip(held(), before, strict=True)))


def held_by(pid: int) -> tuple[int, int]:
    return len(files_of(pid)), threads_of(pid)


class Death(NamedTuple):
    """One row of the table."""

    api_servers: int  # how many; 0 for an engine process alone
    die: Callable[[Served], None]  # ends a process
    streams: dict[str, int]  # what the last lines of the streams over HTTP have in them, by how many streams
    handles: str  # what the finish reason or the error of a request over the socket has in it
    code: int | None = None  # the exit code of the server; None if it goes on
    options: tuple[str, ...] = ()  # of the command
    number: int = 1  # of answers of each stream


GONE, TERM, INT = "EngineDeadError: the engine process at", signal.SIGTERM, signal.SIGINT
DEATHS = {
    "engine process, killed": Death(0, kill_engine_process, {}, GONE, -signal.SIGKILL),
    "engine process, its device lost": Death(0, lose_device, {}, f"EngineProcessError: {LOST}", DEVICE_LOST),
    "engine process, told to end": Death(0, tell(TERM), {}, "length", 0),
    "engine process, told to end twice": Death(0, tell(TERM, TERM), {}, "EngineDeadError", 128 + TERM),
    "engine process, Ctrl-C twice": Death(0, tell(INT, INT), {}, "EngineDeadError", 128 + INT),
    "engine process, told to end at once": Death(
        0, tell(TERM), {}, "the request has not ended 0 s later", 0, ("--drain-seconds", "0")
    ),
    "clients of an engine process": Death(0, kill_clients, {}, "length"),
    "engine process of one API server": Death(1, kill_engine_process, {'"code":"engine_dead"': 3}, GONE),
    "engine process of one API server, twice": Death(1, kill_engine_process_twice, {'"code":"engine_dead"': 3}, GONE),
    "engine process of three API servers": Death(3, kill_engine_process, {'"code":"engine_dead"': 9}, GONE),
    "device of one API server": Death(1, lose_device, {LOST: 3}, f"EngineProcessError: {LOST}"),
    "clients of an API server": Death(1, kill_clients, {DONE: 3}, "length"),
    "one of three API servers": Death(3, kill_api_server, {DONE: 6, CUT: 3}, "length"),
    "server of one API server, killed": Death(1, kill_server, {CUT: 3}, "told to end", -signal.SIGKILL),
    "server of three API servers, killed": Death(3, kill_server, {CUT: 9}, "told to end", -signal.SIGKILL),
    "one API server, told to end": Death(1, tell(TERM), {DONE: 3}, "length", 0),
    "three API servers, told to end": Death(3, tell(TERM), {DONE: 9}, "length", 0),
    "one API server, told to end soon": Death(1, tell(TERM), {ENDS: 3}, "Engine", 0, ("--drain-seconds", "1"), 8),
    "three API servers, told to end soon": Death(3, tell(TERM), {ENDS: 9}, "Engine", 0, ("--drain-seconds", "1"), 8),
    "one API server, Ctrl-C twice": Death(1, tell(INT, INT), {ENDS: 3}, "Engine", 0, (), 8),
    "three API servers, Ctrl-C in a hurry": Death(3, hurry, {CUT: 9}, "Engine", 0, (), 8),
}


@contextmanager
def losing(folder: Path, path: Path, api_servers: int, *options: str) -> Iterator[Served]:
    """A server whose device can be lost."""
    command = (sys.executable, SCRIPT, str(path.parent / "lose"))
    with served(folder, path, api_servers, *options, command=command) as server:
        yield server


@pytest.fixture(params=DEATHS)
def death(request: pytest.FixtureRequest) -> Death:
    return DEATHS[request.param]


@pytest.fixture
def server(death: Death, model_folder: Path, path: Path) -> Iterator[Served]:
    begun = losing if death.die is lose_device else served
    with begun(model_folder, path, death.api_servers, *death.options) as server:
        yield server


def test_a_process_that_ends_is_missed_by_those_that_need_it_alone(death: Death, server: Served, path: Path) -> None:
    expected = texts(server.url) if server.url else []
    with Client(path) as client:
        server.begin(client, sum(death.streams.values()), {**LONG, "n": death.number})
        processes = children(server.process.pid)
        death.die(server)
        lines, requests = server.ends()
        for said, count in death.streams.items():
            fits = [line != DONE if said == CUT else said in line for line in lines]
            assert sum(fits) == count, lines
        assert all(death.handles in said for said in requests), requests
        if server.url and death.die in (kill_engine_process, lose_device):
            refused = httpx.post(server.url + TEXT, json={"prompt": "a"}, timeout=PATIENCE)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        if death.code is None:
            assert_it_goes_on(server, client, len(expected) + lines.count(DONE))
            assert not server.url or texts(server.url) == expected
            return
    assert server.process.wait(PATIENCE) == death.code
    until(lambda: all(is_gone(pid) for pid in processes))
    if server.url:
        assert_is_free(server.url)
    elif death.die is lose_device:
        assert server.process.stderr is not None
        assert f"the engine process ends with exit code {DEVICE_LOST}: {LOST}" in server.process.stderr.read()
    assert path.exists() == (death.die is kill_engine_process), "only one that is killed leaves its socket"


def assert_it_goes_on(server: Served, client: Client, answers: int) -> None:
    """It is ready again, has counted its answers, and has no request, no page and no connection of the dead."""
    if server.url:
        assert get(server.url, "/health").status_code == 200
        until(lambda: is_ready(server.url))
        assert_nothing_is_left(server.url)
        until(lambda: answered(server.url) >= answers)
    client.wait_until_ready(PATIENCE)
    assert client.generate([[3, 4]], SamplingParams(max_tokens=1, ignore_eos=True))[0].finish_reason == "length"
    until(lambda: client.stats().running == 0)
    until(lambda: client.stats().connections == 1 + server.count)
    pages = client.stats().pages
    assert pages is not None
    assert (pages.used, pages.free + pages.cached) == (0, pages.total)


@pytest.mark.parametrize(("api_servers", "die"), [(1, lose_device), (3, kill_api_server)])
def test_a_process_that_ends_the_fourth_time_within_an_hour_ends_the_server(
    model_folder: Path, path: Path, api_servers: int, die: Callable[[Served], None]
) -> None:
    with losing(model_folder, path, api_servers) as server:
        kept = (0, 0)
        for number in range(4):
            until(lambda: is_ready(server.url) and len(children(server.process.pid)) == (1 if api_servers == 1 else 4))
            if number == 1:
                kept = held_by(server.process.pid)
            elif number > 1:  # none of those that have ended leaves a file or a thread
                files, threads = kept
                until(lambda most=(files + 2, threads + 2): all(map(le, held_by(server.process.pid), most)))
            running, before = Stream(server.url), children(server.process.pid)
            die(server)
            running.end()
            until(lambda before=before: server.process.poll() is not None or children(server.process.pid) != before)
        assert server.process.wait(PATIENCE) == 1


def test_an_answer_that_is_not_streamed_has_status_503_and_the_cause(model_folder: Path, path: Path) -> None:
    with losing(model_folder, path, 1) as server:
        lose_device(server)
        lost = httpx.post(server.url + TEXT, json={**LONG, "stream": False}, timeout=PATIENCE)
        assert lost.status_code == 503
        assert lost.json()["error"]["message"].startswith(LOST)


def test_before_it_is_ready_the_first_signal_ends_an_engine_process(model_folder: Path, path: Path) -> None:
    with started_engine_process(model_folder, path, *OPTIONS) as process, Client(path, wait=False) as client:
        process.send_signal(TERM)
        with pytest.raises(EngineDeadError):
            client.wait_until_ready()
        assert process.wait(PATIENCE) == 128 + TERM
    assert not path.exists()
