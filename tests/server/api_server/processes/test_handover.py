"""The server's process gives each API server its connections, whole and in order, and waits for none of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compiled_llm.server.processes import worker_process
from compiled_llm.server.processes.handover import CANNOT_SERVE, READY, TAKE, Start, receive_start, send_start
from compiled_llm.server.processes.worker import GivenApiServer
from compiled_llm.server.processes.worker_process import ApiServerProcess
from compiled_llm.server.processes.workers import ApiServers
from compiled_llm.server.settings import ApiServerSettings
from support.server.engine_processes import PATIENCE

CHILD = """
import os, signal, socket
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
given = socket.socket(fileno=0)
given.recv(int.from_bytes(given.recv(4, socket.MSG_WAITALL), "big"), socket.MSG_WAITALL)
os.write(1, b"b")
signal.sigwait([signal.SIGUSR1])
words = b""
while True:
    word, files, _, _ = socket.recv_fds(given, 1, 1)
    words += word
    for file in files:
        os.write(file, words)
        os.close(file)
        os.write(1, b"l")
"""
"""In place of an API server: it reads from a signal on, and tells each connection which words have come by then."""


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(ApiServerSettings(names=("tiny",), port=0, figures=tmp_path), tmp_path / "engine", False)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has another program run in place of API servers."""
    return lambda code: monkeypatch.setattr(worker_process, "own_command", lambda *_: [sys.executable, "-c", code])


async def waited(condition: Callable[[], object]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), PATIENCE)


def test_an_api_server_is_told_what_it_is_to_be(ends: tuple[socket.socket, socket.socket]) -> None:
    start = Start(
        ApiServerSettings(names=("a",), api_keys=("k" * 20,), ssl_certfile=None), Path("/run/x"), log=("info", "json")
    )
    send_start(ends[0], start)
    ends[0].sendall(READY)
    assert receive_start(ends[1]) == start
    assert ends[1].recv(10) == READY, "and no byte more is read"
    ends[0].close()
    with pytest.raises(EOFError):
        receive_start(ends[1])


def test_an_api_server_that_reads_nothing_stops_none_and_misses_nothing(
    start: Start, child: Callable[[str], None]
) -> None:
    child(CHILD)

    async def talk() -> None:
        process = ApiServerProcess(start, lambda: None, counts=True)
        running, peers = asyncio.create_task(process.run()), list[socket.socket]()

        def given() -> bool:
            connection, peer = socket.socketpair()
            peers.append(peer)
            with connection:
                return process.give(connection)

        assert not given(), "before it takes connections"
        await waited(lambda: process.takes)
        peers.clear()
        while given():
            pass
        peers.pop()
        taken = process.connections
        assert taken == len(peers) > 10
        for all_ready in (True, False, True):
            process.tell(all_ready)
        assert not given(), "not before the words that wait"
        peers.pop()
        process.signal(signal.SIGUSR1)
        await waited(lambda: process.connections == 0)
        await waited(given)
        await waited(lambda: process.connections == 0)
        words = [peer.recv(10_000) for peer in (*peers[:taken], peers[-1])]
        assert words == [TAKE * (number + 1) for number in range(taken)] + [TAKE * taken + b"rnr" + TAKE]
        process.signal(signal.SIGKILL)
        assert await asyncio.wait_for(running, PATIENCE) == -signal.SIGKILL
        assert not process.takes
        assert not given()

    asyncio.run(talk())


def test_an_api_server_answers_given_connections_and_ends_with_who_gives_them(start: Start) -> None:
    async def talk() -> None:
        ours, theirs = socket.socketpair()
        reading, words = os.pipe()
        server = GivenApiServer(start, theirs, words)
        serving = asyncio.create_task(server.serve())
        for request, answer in [(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"HTTP/1.1 200"), (b"", b"")]:
            connection, peer = socket.socketpair()
            with connection, peer:
                socket.send_fds(ours, [TAKE], [connection.fileno()])
                connection.close()
                peer.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(peer, request)
                if answer:
                    assert (await asyncio.get_running_loop().sock_recv(peer, 1000)).startswith(answer)
        ours.send(READY)
        await waited(lambda: server.api_server.all_ready)
        await waited(lambda: not server.server_state.connections)
        ours.close()
        await asyncio.wait_for(serving, PATIENCE)
        assert os.read(reading, 100) == b"bll"

    asyncio.run(talk())


def test_an_api_server_that_cannot_serve_is_not_started_again(start: Start, child: Callable[[str], None]) -> None:
    child(f"import sys; sys.exit({CANNOT_SERVE})")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        api_servers = ApiServers(start, listening, 1)
        api_servers._has_begun = True  # others may have
        assert asyncio.run(api_servers.answer()) == "an API server cannot serve; it has said why"
