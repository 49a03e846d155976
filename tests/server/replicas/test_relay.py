"""From an API server through a replica to an engine process and back, and what happens if one of them ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from compiled_llm import SamplingParams
from compiled_llm.client import EngineBusyError, EngineDeadError, EngineProcessError
from compiled_llm.client.transport.connection import ThreadConnection
from compiled_llm.engine.engine import Engine
from compiled_llm.protocol.messages import Ready, Submit
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.server.replicas.relay import Relay
from compiled_llm.server.replicas.replica_client import ReplicaClient
from compiled_llm.server.replicas.replica_line import ReplicaLine
from support.server.engine_processes import PATIENCE, Loop

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


class OneReplica:
    """A replica in this process, and what may happen to it."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.gone: Exception | None = None  # why an answer ends
        self.silent = False  # whether it no longer says that it is there
        self.open = 0

    async def ready(self) -> Ready:
        if self.silent:
            await asyncio.Event().wait()
        return await self.relay.ready

    async def answer(self, submit: Submit) -> AsyncIterator[bytes]:
        if self.gone is not None:
            raise self.gone
        self.open += 1
        try:
            async for data in self.relay.answer(submit):
                yield data
                if self.gone is not None:
                    raise self.gone
        finally:
            self.open -= 1


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_llm.server.replicas.replica_line._LOOKING", 0.05)


def play(path: Path, game: Callable[[OneReplica, ReplicaClient], Coroutine[Any, Any, None]]) -> list[Exception]:
    """Play with a client of one replica; why its engine process has gone, if it has."""
    lost: list[Exception] = []

    async def playing() -> None:
        connection = await asyncio.to_thread(ThreadConnection, path)
        replica = OneReplica(Relay(connection, lost.append))
        client = ReplicaClient(replica)
        await client.connect()
        try:
            await game(replica, client)
        finally:
            client.close()
            await asyncio.sleep(0.01)
            connection.close()

    asyncio.run(asyncio.wait_for(playing(), PATIENCE))
    return lost


def test_who_waits_is_told_when_the_event_loop_ends(engine_process: Loop, path: Path) -> None:
    connection, waiting, clients = ThreadConnection(path), list[RequestHandle](), list[ReplicaClient]()

    async def playing() -> None:
        clients.append(ReplicaClient(OneReplica(Relay(connection, lambda _: None))))
        await clients[0].connect()
        waiting.append(clients[0].submit([5, 6, 7], LONG))
        await anext(aiter(waiting[0]))

    asyncio.run(asyncio.wait_for(playing(), PATIENCE))
    with pytest.raises(EngineDeadError, match="the event loop that has read the connection is closed"):
        waiting[0].result(PATIENCE)
    connection.close()
    clients[0].close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_answers_are_those_of_the_engine(engine_process: Loop, path: Path, engine: Engine) -> None:
    prompts, scored = [[5, 6, 7], [8, 9], [10]], SamplingParams(temperature=0, max_tokens=5, logprobs=2, n=2)
    expected = engine.generate(prompts, GREEDY)  # type: ignore[arg-type]
    wanted = engine.submit([5, 6, 7], scored).result()

    async def game(replica: OneReplica, client: ReplicaClient) -> None:
        outputs = await client.generate(prompts, GREEDY)  # type: ignore[arg-type]
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        (output,) = await client.generate([5, 6, 7], scored)
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in wanted.outputs]
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert [len(entry) >= 2 for entry in logprobs] == [True] * 5
        asked = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1)
        (output,) = await client.generate([3] * 600, asked)
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 600
        (output,) = await client.generate([3] * 600, GREEDY, hidden_states=[-1])  # type: ignore[arg-type]
        assert output.hidden_states is not None
        assert len(output.hidden_states[-1]) == 600 + len(output.token_ids) - 1
        with pytest.raises(ValueError, match="tokens"):
            await client.submit([5] * 100_000, GREEDY)
        with pytest.raises(EngineProcessError, match="one by one"):
            await client.stats()
        await until(lambda: replica.open == 0)  # who waits may be awake before the replica's last answer has ended

    play(path, game)


def test_two_api_servers_may_give_their_requests_the_same_numbers(engine_process: Loop, path: Path) -> None:
    async def game(replica: OneReplica, client: ReplicaClient) -> None:
        other = ReplicaClient(replica)
        await other.connect()
        handles = [one.submit([token], GREEDY) for token in (5, 9) for one in (client, other)]
        tokens = [(await handle).token_ids for handle in handles]
        assert tokens[0] == tokens[1] != tokens[2] == tokens[3]
        other.close()

    play(path, game)


def test_a_replica_says_how_its_engine_process_is_doing(engine_process: Loop, path: Path) -> None:
    async def game(replica: OneReplica, client: ReplicaClient) -> None:
        before = await replica.relay.stats()
        await client.submit([5, 6, 7], GREEDY)
        first, second = await asyncio.gather(replica.relay.stats(), replica.relay.stats())
        assert first.prompt_tokens - before.prompt_tokens == second.prompt_tokens - before.prompt_tokens == 3
        assert first.new_tokens - before.new_tokens == 6
        assert not replica.relay._asked
        with pytest.raises(EngineProcessError, match="Ray's metrics"):
            await client.stats()

    play(path, game)


def test_an_answer_that_nobody_waits_for_any_more_holds_up_no_others(engine_process: Loop, path: Path) -> None:
    async def game(replica: OneReplica, client: ReplicaClient) -> None:
        relay, known = replica.relay, await replica.relay.stats()
        leaving, staying = asyncio.create_task(relay.stats()), asyncio.create_task(relay.stats())
        await asyncio.sleep(0)
        leaving.cancel()
        relay._sort([replace(known, number=number) for number in relay._asked])  # before that has left
        assert (await staying).steps == known.steps
        assert leaving.cancelled()

    play(path, game)


def test_a_client_that_leaves_ends_its_request_alone(engine_process: Loop, path: Path, engine: Engine) -> None:
    async def game(replica: OneReplica, client: ReplicaClient) -> None:
        stays, leaves = client.submit([5, 6], LONG), client.submit([7, 8], LONG)
        await until(lambda: any(answer.tokens for answer in leaves.answers))
        leaves.cancel()
        with pytest.raises(ValueError, match="the client has left"):
            await leaves
        assert len((await stays).token_ids) == 400
        await until(lambda: engine.stats().running == 0 and replica.open == 0)

    play(path, game)


def test_an_api_server_that_ends_takes_its_requests_along(engine_process: Loop, path: Path, engine: Engine) -> None:
    async def game(replica: OneReplica, client: ReplicaClient) -> None:
        handle = client.submit([5, 6], LONG)
        await until(lambda: any(answer.tokens for answer in handle.answers))
        client.close()
        await until(lambda: engine.stats().running == 0 and replica.open == 0)

    play(path, game)


@pytest.mark.parametrize(
    ("gone", "kind"),
    [
        (EngineDeadError("the replica has ended"), EngineProcessError),
        (EngineBusyError("too many"), EngineBusyError),
        (KeyError("/a/path"), EngineProcessError),
    ],
)
def test_a_replica_that_fails_ends_what_it_had_with_an_error(
    engine_process: Loop, path: Path, gone: Exception, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    async def game(replica: OneReplica, client: ReplicaClient) -> None:
        handle = client.submit([5, 6], LONG)
        await until(lambda: any(answer.tokens for answer in handle.answers))
        replica.gone = gone
        with pytest.raises(kind) as raised:
            await handle
        assert "/a/path" not in str(raised.value)
        replica.gone = None
        assert len((await client.submit([5, 6], GREEDY)).token_ids) == 6

    with caplog.at_level(logging.ERROR, "compiled_llm.server"):
        play(path, game)
    assert ("has failed" in caplog.text) == isinstance(gone, KeyError)


def test_if_no_replica_answers_for_long_there_is_none(engine_process: Loop, path: Path) -> None:
    async def game(replica: OneReplica, client: ReplicaClient) -> None:
        line = client._session.line
        assert isinstance(line, ReplicaLine)
        replica.silent, line._patience = True, 0.3  # only now: while it answers, a busy machine may need more
        assert str(await client.wait_until_lost()) == "no replica has answered for 0.3 s"
        with pytest.raises(EngineDeadError):
            client.submit([5], GREEDY)

    play(path, game)


def test_who_waits_hears_why_no_replica_can_be_asked(
    engine_process: Loop, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def game(replica: OneReplica, client: ReplicaClient) -> None:
        async def unknown() -> Ready:
            raise KeyError("/a/path")

        replica.ready = unknown  # type: ignore[method-assign]
        assert str(await asyncio.wait_for(client.wait_until_lost(), PATIENCE)) == "replicas cannot be asked: KeyError"

    play(path, game)
    assert "replicas cannot be asked" in caplog.text


def test_a_replica_whose_engine_process_has_gone_says_so_once(engine_process: Loop, path: Path) -> None:
    async def game(replica: OneReplica, client: ReplicaClient) -> None:
        handle = client.submit([5, 6], LONG)
        await until(lambda: any(answer.tokens for answer in handle.answers))
        engine_process.call(lambda: [connection.close() for connection in engine_process.server._connections])
        with pytest.raises(EngineProcessError, match="the process that runs the model has ended"):
            await handle

    (error,) = play(path, game)
    assert isinstance(error, EngineDeadError)
