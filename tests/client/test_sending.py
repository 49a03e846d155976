"""Whoever sends to an engine process never waits for it, even if it reads nothing."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.client import AsyncClient, EngineProcessError
from compiled_llm.client.transport import connection
from compiled_llm.protocol.frames import Frames, frame_of
from compiled_llm.protocol.messages import VERSION, Cancel, FromClient, Ready, Refused, Submit, Welcome

READY = Ready("a model", 2**30, [2], 10**9, 8)
PATIENCE = 60.0


class Deaf:
    """An engine process that reads only once it is told to; then it refuses what it was asked."""

    def __init__(self, path: Path) -> None:
        self.heard: list[Any] = []
        self.listens = threading.Event()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        peer, _ = self._listening.accept()
        frames: Frames[Any] = Frames(FromClient)
        list(frames.feed(peer.recv(2**16)))
        peer.sendall(frame_of(Welcome(VERSION, "a test", 1)) + frame_of(READY))
        self.listens.wait(PATIENCE)
        with suppress(OSError):  # its client may have left
            while data := peer.recv(2**16):
                for message in frames.feed(data):
                    self.heard.append(message)
                    if isinstance(message, Submit):
                        peer.sendall(frame_of(Refused(message.request, "full", "it is a test")))


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        yield Path(folder) / "socket"


def prompts(count: int) -> list[list[int]]:
    return [[2**20 + number] * (10 + 5000 * (number % 3)) for number in range(count)]


def test_an_event_loop_goes_on_while_an_engine_process_reads_nothing(path: Path) -> None:
    deaf, asked = Deaf(path), prompts(60)  # more than the socket takes

    async def run() -> None:
        async with AsyncClient(path) as client:
            handles = [client.submit(prompt) for prompt in asked]
            handles[1].cancel()
            await asyncio.sleep(0.01)
            assert not any(handle.done for handle in handles)
            deaf.listens.set()
            answers = await asyncio.gather(*(_failure(handle) for handle in handles))
            assert answers == ["it is a test"] * len(asked)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    submitted = [message for message in deaf.heard if isinstance(message, Submit)]
    assert [message.prompt for message in submitted] == asked
    (cancelled,) = [message for message in deaf.heard if isinstance(message, Cancel)]
    assert cancelled.request == submitted[1].request


async def _failure(handle: Any) -> str:
    try:
        await handle
    except EngineProcessError as error:
        return str(error)
    return "none"


def test_an_engine_process_that_reads_nothing_for_long_is_asked_no_more(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = Deaf(path)

    async def run() -> None:
        async with AsyncClient(path) as client:
            handles = [client.submit(prompt) for prompt in prompts(60)]
            monkeypatch.setattr(connection, "_PATIENCE", 0)
            with pytest.raises(
                EngineProcessError, match="the engine process has read nothing for 0 s: its process is stopped"
            ):
                client.submit([3])
            handles[0].cancel()  # what is small is taken
            deaf.listens.set()
            assert await _failure(handles[-1]) == "it is a test"
            assert await _failure(client.submit([3])) == "it is a test", "the next one is taken"

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_threads_that_send_at_once_send_whole_frames(path: Path) -> None:
    deaf, asked = Deaf(path), prompts(60)

    async def run() -> None:
        async with AsyncClient(path) as client:
            sending = [asyncio.to_thread(client.submit, prompt) for prompt in asked]
            threading.Timer(0.05, deaf.listens.set).start()
            for handle in await asyncio.gather(*sending):
                assert await _failure(handle) == "it is a test"

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert sorted(message.prompt for message in deaf.heard) == sorted(asked)


def test_a_client_that_is_closed_drops_what_waits(path: Path) -> None:
    deaf = Deaf(path)

    async def run() -> None:
        client = AsyncClient(path)
        await client.connect()
        handles = [client.submit(prompt) for prompt in prompts(60)]
        client.close()
        assert "the client is closed" in await _failure(handles[-1])

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    while any(thread.name == "compiled_llm client sends" for thread in threading.enumerate()):
        time.sleep(0.001)
    deaf.listens.set()
