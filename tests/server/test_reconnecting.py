"""A client whose engine process is lost says so to whoever waits, and connects again for whoever asks next; so does one
whose event loop has ended.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.client import AsyncClient, Client, EngineDeadError, EngineProcessError, base
from compiled_llm.client.base import BaseClient
from compiled_llm.client.transport.session import ClientSession
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from support.characters import character_tokenizer
from support.engine.text_tokenizers import byte_level
from support.server.engine_processes import PATIENCE, Loop, engine_in_thread, until
from support.server.scripted import scripted, tool_tokenizer

PROMPT = [3, 4, 5]
SHORT = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.0)
LONG = SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "RETURNS_WITHIN", 0.1)


def vanish(loop: Loop) -> None:
    """End an engine process as a kill does: without a word."""
    for connection in tuple(loop.server._connections):
        loop.call(connection._writer.transport.abort)
    loop.close()


async def done(answer: Any) -> Any:
    return await answer if isinstance(answer, Awaitable) else answer


def until_lost(client: BaseClient) -> None:
    until(lambda: client._session.lost is not None)


GONE, NO_SOCKET = "has gone: its process has ended", "there is no such socket; start an engine process with"


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_requests_end_and_the_next_one_connects_again(
    engine: Engine, path: Path, kind: type[Client | AsyncClient]
) -> None:
    async def generated(client: Client | AsyncClient) -> list[int]:
        return (await done(client.generate([PROMPT], SHORT)))[0].token_ids

    async def main(first: Loop) -> None:
        client = kind(path)
        if isinstance(client, AsyncClient):
            await client.connect()
        expected, handle = await generated(client), client.submit(PROMPT, LONG)
        await anext(aiter(handle))
        vanish(first)
        with pytest.raises(EngineDeadError, match=GONE):
            await handle
        with pytest.raises(EngineDeadError, match=NO_SOCKET if kind is Client else GONE):  # an event loop may not wait
            client.submit(PROMPT)
        for call in (client.stats, client.wait_until_ready, lambda: client.generate([PROMPT])):
            with pytest.raises(EngineDeadError, match=NO_SOCKET):
                await done(call())
        with engine_in_thread(engine, path):
            assert await generated(client) == (await client.submit(PROMPT, SHORT)).token_ids == expected
            running = client.submit(PROMPT, SamplingParams(max_tokens=200, ignore_eos=True))
            handle.cancel()  # of the first engine process, where a request had the same number
            assert (await running).finish_reason == "length"
            assert (await done(client.stats())).connections == 1
            client.close()

    with engine_in_thread(engine, path) as first:
        asyncio.run(main(first))


def test_who_waits_finds_a_process_that_comes_back(engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "RETURNS_WITHIN", PATIENCE)
    with engine_in_thread(engine, path) as first, Client(path) as client:
        expected = client.generate([PROMPT], SHORT)[0].token_ids
        vanish(first)
        until_lost(client)
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(client.generate, [PROMPT], SHORT) for _ in range(8)]
            time.sleep(0.05)
            loop = Loop(path)
            loop.server.report("loading")
            time.sleep(0.05)
            loop.open(engine)
            assert [answer.result(PATIENCE)[0].token_ids for answer in answers] == [expected] * 8
        assert client.stats().connections == 1
        loop.close()


def test_an_engine_process_that_is_not_ready_again_says_so(engine: Engine, path: Path) -> None:
    with engine_in_thread(engine, path) as first, Client(path) as client:
        vanish(first)
        until_lost(client)
        loop = Loop(path)
        with pytest.raises(EngineProcessError, match=r"the engine process is not ready \(starting\)"):
            client.submit(PROMPT)
        with pytest.raises(TimeoutError, match="the engine process is not ready after"):
            client.wait_until_ready(0.01)
        loop.close()


def test_text_is_that_of_the_next_engine_processes_tokenizer(engine: Engine, path: Path) -> None:
    folders = [path.parent / "first", path.parent / "second"]
    tokenizers: list[Any] = [character_tokenizer(), byte_level()]
    for folder, tokenizer in zip(folders, tokenizers, strict=True):
        tokenizer.save_pretrained(folder)
    with engine_in_thread(engine, path, folders[0]) as first, Client(path, tokenizer=True) as client:
        texts = [client.generate([PROMPT], SHORT)[0]]
        vanish(first)
        until_lost(client)
        with engine_in_thread(engine, path, folders[1]):
            texts.append(client.generate([PROMPT], SHORT)[0])
    assert texts[0].token_ids == texts[1].token_ids
    assert texts[1].text == tokenizers[1].decode(texts[1].token_ids)
    assert texts[0].text != texts[1].text


def test_a_client_that_was_closed_stays_so(engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "RETURNS_WITHIN", PATIENCE)
    with engine_in_thread(engine, path) as first:
        client = Client(path)
        vanish(first)
        until_lost(client)
        waiting = ThreadPoolExecutor().submit(client.wait_until_ready)
        time.sleep(0.02)
        client.close()
    with engine_in_thread(engine, path) as loop:
        with pytest.raises(EngineDeadError, match="the client is closed"):
            waiting.result(PATIENCE)
        with pytest.raises(EngineDeadError):
            client.submit(PROMPT)
        until(lambda: not loop.server._connections)


# ---- a client for event loops reads in the one that connects it, until the connection ends


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
    async def use(client: AsyncClient) -> tuple[RequestHandle, Future[RequestOutput], Any]:
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
