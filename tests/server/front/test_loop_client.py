"""The front reads its generator in its event loop, and stops when the connection ends, whoever has ended it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.client import GeneratorLostError
from compiled_llm.client.session import Session
from compiled_llm.engine.params import SamplingParams
from compiled_llm.server.front.loop_client import LoopClient
from support.generators import PATIENCE, Loop

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def in_a_loop(path: Path, use: Callable[[LoopClient], Awaitable[None]]) -> None:
    async def running() -> None:
        client = LoopClient(path)
        await asyncio.wait_for(client.connect(), PATIENCE)
        await asyncio.wait_for(use(client), PATIENCE)

    asyncio.run(running())


def test_what_comes_is_taken_in_the_event_loop(generator: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, own = set(), Session.take

    def take(session: Session, messages: object) -> None:
        threads.add(threading.current_thread())
        own(session, messages)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "take", take)

    async def use(client: LoopClient) -> None:
        output = await client.submit([1, 2, 3], PARAMS)
        assert len(output.outputs[0].token_ids) == PARAMS.max_tokens
        client.close()

    in_a_loop(generator.generator._path, use)
    assert threads == {threading.main_thread()}


def test_a_client_that_closes_reads_no_more_and_its_requests_end(generator: Loop) -> None:
    async def use(client: LoopClient) -> None:
        connection: Any = client._link._line
        descriptor = connection._socket.fileno()
        handle = client.submit([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
        client.close()
        assert isinstance(await client.wait_until_lost(), GeneratorLostError)
        with pytest.raises(GeneratorLostError):
            await handle
        assert connection._socket.fileno() == -1
        assert not asyncio.get_running_loop().remove_reader(descriptor)  # the next socket may have its number

    in_a_loop(generator.generator._path, use)


def test_connections_follow_one_another(generator: Loop) -> None:
    async def use(client: LoopClient) -> None:
        for _ in range(3):
            await client.submit([1, 2, 3], PARAMS)
            client.close()
            await client.wait_until_lost()
            client = LoopClient(generator.generator._path)
            await client.connect()
        client.close()

    in_a_loop(generator.generator._path, use)
