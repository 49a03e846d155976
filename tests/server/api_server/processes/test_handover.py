"""What the server's process and its API servers tell each other arrives whole, in order, and waits for nobody."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compiled_llm.server.processes import worker_process
from compiled_llm.server.processes.handover import (
    CANNOT_SERVE,
    LEFT,
    READY,
    TAKE,
    Channel,
    Start,
    receive_start,
    send_start,
)
from compiled_llm.server.processes.workers import ApiServers
from compiled_llm.server.settings import ApiServerSettings
from support.server.engine_processes import PATIENCE

Word = tuple[bytes, "socket.socket | None"]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


async def waited(condition: object) -> None:
    assert callable(condition)
    while not condition():
        await asyncio.sleep(0.001)


def nothing() -> None: ...


def test_an_api_server_is_told_what_it_is_to_be(ends: tuple[socket.socket, socket.socket]) -> None:
    start = Start(ApiServerSettings(names=("a",), api_keys=("k" * 20,), ssl_certfile=None), Path("/run/x"), logs=True)
    send_start(ends[0], start)
    ends[0].sendall(READY)
    assert receive_start(ends[1]) == start
    assert ends[1].recv(10) == READY, "and no byte more is read"
    ends[0].sendall(len(pickle.dumps(start)).to_bytes(4, "big") + b"half")
    ends[0].close()
    with pytest.raises(EOFError):
        receive_start(ends[1])


def test_each_word_has_its_own_connection(ends: tuple[socket.socket, socket.socket]) -> None:
    async def talk() -> list[tuple[bytes, bytes | None]]:
        heard: list[Word] = []
        loss_reported = Channel(ends[0], lambda word, connection: None, nothing)
        Channel(ends[1], lambda word, connection: heard.append((word, connection)), nothing)
        peers = []
        for number in range(5):
            given, peer = socket.socketpair()
            loss_reported.say(READY)
            with given:
                assert loss_reported.give(given)
            peer.send(b"%d" % number)
            peers.append(peer)
        await asyncio.wait_for(waited(lambda: len(heard) == 10), PATIENCE)
        read = [(word, connection and connection.recv(10)) for word, connection in heard]
        for each in [*peers, *(connection for _, connection in heard if connection)]:
            each.close()
        return read

    pairs = [[(READY, None), (TAKE, b"%d" % number)] for number in range(5)]
    assert asyncio.run(talk()) == [word for pair in pairs for word in pair]


def test_an_end_that_reads_nothing_keeps_nobody_waiting_and_loses_no_word(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    async def talk() -> int:
        heard: list[bytes] = []
        loss_reported = Channel(ends[0], lambda word, connection: None, nothing)
        given, peer = socket.socketpair()
        with given, peer:
            taken = 0
            while loss_reported.give(given):
                taken += 1
            for _ in range(100):
                loss_reported.say(LEFT)
            assert not loss_reported.give(given), "not before the words that wait"
            assert len(os.listdir("/proc/self/fd")) < 100
            reading = Channel(
                ends[1], lambda word, connection: (heard.append(word), connection and connection.close()), nothing
            )
            await asyncio.wait_for(waited(lambda: len(heard) == taken + 100), PATIENCE)
            assert loss_reported.give(given)
            reading.close()
        assert heard == [TAKE] * taken + [LEFT] * 100
        return taken

    assert asyncio.run(talk()) > 10


def test_the_end_of_one_is_told_to_the_other_once(ends: tuple[socket.socket, socket.socket]) -> None:
    async def talk() -> None:
        lost: list[str] = []
        loss_reported = Channel(ends[0], lambda word, connection: None, lambda: lost.append("told"))
        other = Channel(ends[1], lambda word, connection: None, lambda: lost.append("other"))
        other.close()
        other.close()
        await asyncio.wait_for(waited(lambda: lost), PATIENCE)
        loss_reported.say(READY)
        assert not loss_reported.give(ends[0])
        await asyncio.sleep(0.01)
        assert lost == ["told"]

    asyncio.run(talk())


def test_an_api_server_that_cannot_serve_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import sys; sys.exit({CANNOT_SERVE})"
    monkeypatch.setattr(worker_process, "own_command", lambda *_: [sys.executable, "-c", code])
    settings = ApiServerSettings(names=("tiny",), port=0, figures=tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        api_servers = ApiServers(Start(settings, tmp_path / "generator", False), listening, 1)
        api_servers._has_begun = True  # others may have
        assert asyncio.run(api_servers.run()) == "an API server cannot serve; it has said why"
