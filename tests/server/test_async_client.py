"""A client for event loops reads in the one that connects it, until the connection ends, whoever has ended it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.client import AsyncClient, Client, EngineDeadError
from compiled_llm.client.handle import RemoteHandle
from compiled_llm.client.transport.session import ClientSession
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from support.server.engine_processes import PATIENCE, Loop, until
from support.server.scripted import scripted, tool_tokenizer

PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


CLOSED = "the event loop that has read the connection is closed"


def in_a_loop(path: Path, use: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
    async def running() -> Any:
        client = AsyncClient(path)
        await asyncio.wait_for(client.connect(), PATIENCE)
        return await asyncio.wait_for(use(client), PATIENCE)

    return asyncio.run(running())


def test_what_comes_is_taken_in_the_loop(engine_process: Loop, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, own = set(), ClientSession.take

    def take(session: ClientSession, messages: object) -> None:
        threads.add(threading.current_thread())
        own(session, messages)  # type: ignore[arg-type]

    monkeypatch.setattr(ClientSession, "take", take)

    async def use(client: AsyncClient) -> None:
        output = await client.submit([1, 2, 3], PARAMS)
        assert len(output.outputs[0].token_ids) == PARAMS.max_tokens
        client.close()

    in_a_loop(path, use)
    assert threads == {threading.main_thread()}


def test_a_client_that_closes_reads_no_more_and_its_requests_end(engine_process: Loop, path: Path) -> None:
    async def use(client: AsyncClient) -> None:
        connection: Any = client._session._line
        descriptor = connection._socket.fileno()
        handle = client.submit([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True))
        client.close()
        assert isinstance(await client.wait_until_lost(), EngineDeadError)
        with pytest.raises(EngineDeadError):
            await handle
        assert connection._socket.fileno() == -1
        assert not asyncio.get_running_loop().remove_reader(descriptor)  # the next socket may have its number

    in_a_loop(path, use)


def test_a_thread_whose_event_loop_reads_the_answer_must_not_wait_for_it(engine_process: Loop, path: Path) -> None:
    async def use(client: AsyncClient) -> None:
        handle = client.submit([1, 2, 3], PARAMS)
        for waiting in (handle.result, lambda: list(handle)):
            with pytest.raises(RuntimeError, match="its event loop reads the connection; await the handle, or use"):
                waiting()
        elsewhere = await asyncio.to_thread(handle.result, PATIENCE)
        assert elsewhere.token_ids == (await handle).token_ids == handle.result().token_ids
        client.close()

    in_a_loop(path, use)


def test_other_event_loops_use_it_while_its_own_runs_and_connect_again_then(engine_process: Loop, path: Path) -> None:
    async def use(client: AsyncClient) -> AsyncClient:
        async def tokens() -> list[int]:
            return [token async for token in client.submit([1, 2, 3], PARAMS)]

        assert await asyncio.to_thread(asyncio.run, tokens()) == await tokens()
        return client

    async def use_again(client: AsyncClient) -> None:
        with pytest.raises(EngineDeadError, match=CLOSED):
            client.submit([1, 2, 3], PARAMS)
        (output,) = await client.generate([1, 2, 3], PARAMS)
        assert len(output.token_ids) == PARAMS.max_tokens
        assert (await client.stats()).connections == 1
        client.close()

    asyncio.run(asyncio.wait_for(use_again(in_a_loop(path, use)), PATIENCE))


def test_who_waits_hears_that_the_event_loop_has_ended(engine_process: Loop, engine: Engine, path: Path) -> None:
    async def use(client: AsyncClient) -> tuple[RemoteHandle, Future[RequestOutput], Any]:
        handle = client.submit([1, 2, 3], SamplingParams(max_tokens=900, ignore_eos=True))
        waiting = others.submit(handle.result, PATIENCE)
        await anext(aiter(handle))
        return handle, waiting, client._session._line

    with ThreadPoolExecutor() as others:
        handle, waiting, connection = in_a_loop(path, use)  # which nobody closes
        for wait in (lambda: waiting.result(PATIENCE), handle.result):
            with pytest.raises(EngineDeadError, match=CLOSED):
                wait()
    assert connection._socket.fileno() == -1
    until(lambda: engine.stats().running == 0)


def test_a_loop_that_is_closed_with_tasks_left_is_noticed_by_the_next_request(engine_process: Loop, path: Path) -> None:
    loop, client = asyncio.new_event_loop(), AsyncClient(path)
    loop.run_until_complete(client.connect())
    loop.close()
    with pytest.raises(EngineDeadError, match=CLOSED):
        client.submit([1, 2, 3], PARAMS)
    client.close()


def test_clients_of_both_kinds_hear_the_heartbeat_without_a_request(tmp_path: Path) -> None:
    """By it programs tell an engine process that hangs from one that is busy."""
    path = tmp_path / "socket"
    with scripted(path, tool_tokenizer()), Client(path) as client:
        before = client.heard
        until(lambda: client.heard > before)

        async def listening() -> None:
            async with AsyncClient(path) as other:
                begun = other.heard
                while other.heard == begun:
                    await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(listening(), 30))
