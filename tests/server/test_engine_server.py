"""What clients get of an engine process is what its engine gives in process, whoever else is connected."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.client import AsyncClient, Client, EngineDeadError, EngineProcessError
from compiled_llm.engine import emitted
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.logprobs import request_logprobs
from compiled_llm.protocol.frames import frame_of
from compiled_llm.protocol.messages import AskStats, Cancel, Preparing, Refused, StepUpdates, Submit, Welcome
from compiled_llm.requests.outputs import Completion, RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from compiled_llm.server.engine_process import connection
from support.engine.text_tokenizers import byte_level
from support.execution.failing_calls import fail_once
from support.server.engine_processes import PATIENCE, Bytes, Loop, engine_in_thread, until
from support.tiny_models import tiny_qwen3

PROMPT = list(range(3, 13))


def settings(**others: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True, **others})


def endless(**others: Any) -> SamplingParams:
    return settings(**{"max_tokens": 900, **others})


@pytest.fixture
def client(engine_process: Loop, path: Path) -> Any:
    with Client(path, tokenizer=byte_level()) as client:
        yield client


def assert_equal(ours: RequestOutput, theirs: RequestOutput) -> None:
    """Times apart, and as far as numbers depend on what else was in a batch."""
    assert (ours.prompt_token_ids, len(ours.outputs)) == (theirs.prompt_token_ids, len(theirs.outputs))
    for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
        assert visible(mine) == visible(other)
        assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
        assert_logprobs_equal(mine.logprobs, other.logprobs)
    assert_logprobs_equal(ours.prompt_logprobs, theirs.prompt_logprobs)


def visible(answer: Completion) -> tuple[Any, ...]:
    return answer.index, answer.token_ids, answer.finish_reason, answer.text, answer.stop_reason


def assert_logprobs_equal(ours: Any, theirs: Any) -> None:
    assert (ours is None) == (theirs is None)
    for mine, other in zip(ours or (), theirs or (), strict=True):
        assert (mine is None) == (other is None)
        for token, entry in (mine or {}).items():
            assert entry.rank == other[token].rank
            assert entry.logprob == pytest.approx(other[token].logprob, abs=1e-3)


@pytest.mark.parametrize(
    "params",
    [
        settings(n=3, logprobs=2, prompt_logprobs=1),
        settings(n=2, logprob_token_ids=[70, 5, 41]),
        settings(max_tokens=60, stop=["a", "e", "s"], min_tokens=3),
        settings(structured_outputs=StructuredOutputsParams(json={"enum": ["x", 7]}), ignore_eos=False, n=2),
    ],
    ids=lambda params: ", ".join(name for name, value in vars(params).items() if value != getattr(settings(), name)),
)
def test_answers_are_those_of_the_engine(client: Client, engine: Engine, params: SamplingParams) -> None:
    """Each setting is tried over HTTP, in test_sampling_settings."""
    prompts = [PROMPT, "the quick fox", PROMPT[:3]]
    for ours, theirs in zip(client.generate(prompts, params), engine.generate(prompts, params), strict=True):
        assert_equal(ours, theirs)


def test_tokens_and_text_come_as_they_do_in_process(client: Client, engine: Engine) -> None:
    (expected,) = engine.generate([PROMPT], settings(max_tokens=40))
    assert list(client.submit(PROMPT, settings(max_tokens=40))) == expected.token_ids
    pieces = list(client.stream(PROMPT, settings(max_tokens=40)))
    assert len(pieces) > 5
    assert "".join(pieces) == expected.text

    async def both() -> tuple[list[int], str, RequestOutput]:
        tokens = [token async for token in client.submit(PROMPT, settings(max_tokens=40))]
        text = "".join([piece async for piece in client.stream(PROMPT, settings(max_tokens=40))])
        return tokens, text, await client.submit(PROMPT, settings(max_tokens=40))

    tokens, text, output = asyncio.run(both())
    assert (tokens, text) == (expected.token_ids, expected.text)
    assert_equal(output, expected)


def test_a_client_for_event_loops_waits_without_stopping_them(engine: Engine, engine_process: Loop, path: Path) -> None:
    prompts, ticks = [PROMPT, "the quick fox"], []

    async def tick() -> None:
        while True:
            ticks.append(1)
            await asyncio.sleep(0)

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        async with AsyncClient(path, tokenizer=byte_level()) as client:
            outputs = await client.generate(prompts, settings(n=2))
            for ours, theirs in zip(outputs, engine.generate(prompts, settings(n=2)), strict=True):
                assert_equal(ours, theirs)
            with pytest.raises(ValueError, match="from 0 to 379"):
                await client.generate([PROMPT, [999]], endless())
            asking = asyncio.create_task(client.generate([PROMPT], endless()))
            while (await client.stats()).running == 0:
                pass
            asking.cancel()
            while (await client.stats()).running:
                pass
        ticking.cancel()

    asyncio.run(main())
    assert len(ticks) > 10


def test_priorities_deadlines_and_salts_reach_the_engine(client: Client, engine: Engine) -> None:
    submitted, submit = [], engine.submit
    engine.submit = lambda *args, **options: submitted.append(options) or submit(*args, **options)  # type: ignore[method-assign]
    client.submit(PROMPT, settings(), priority=-2, timeout=50.0, cache_salt="me").result(PATIENCE)
    assert submitted == [{"priority": -2, "timeout": 50.0, "cache_salt": "me"}]


def test_what_the_engine_refuses_raises_what_the_engine_does(client: Client, engine: Engine) -> None:
    refused: list[tuple[Any, SamplingParams]] = [
        ([999], settings()),
        ([-1], settings()),
        ([2**62], settings()),
        ([], settings()),
        (PROMPT, settings(max_tokens=5000)),
        (PROMPT, settings(logit_bias={999: 1.0})),
    ]
    for prompt, params in refused:
        with pytest.raises(ValueError) as theirs:  # noqa: PT011
            engine.submit(prompt, params)
        with pytest.raises(ValueError) as ours:  # noqa: PT011
            client.submit(prompt, params).result(PATIENCE)
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(ValueError, match="from 0 to 379"):
        client.generate([PROMPT, [999]], endless())
    assert_equal(*client.generate([PROMPT], settings()), *engine.generate([PROMPT], settings()))


def test_a_frame_cannot_ask_for_what_sampling_params_do_not_have(engine_process: Loop, path: Path) -> None:
    with Bytes(path) as peer:
        peer.greet()
        for number, params in enumerate(
            ({"colour": 1}, {"logits_processors": []}, {"structured_outputs": {"xml": 1}}, {"n": 10**9}, {"top_p": "x"})
        ):
            peer.send(Submit(number, PROMPT, params))
            message = peer.receive()
            assert (message.request, message.kind) == (number, "invalid")  # type: ignore[union-attr]


def test_a_fault_in_one_request_ends_that_alone(client: Client, engine: Engine, monkeypatch: Any) -> None:
    running = client.submit(PROMPT, settings(max_tokens=200))
    next(iter(running))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "submit", lambda *_, **__: {}["missing"])
        with pytest.raises(EngineProcessError, match="failed of KeyError; the engine process's log says more"):
            client.submit(PROMPT, settings()).result(PATIENCE)
    assert running.result(PATIENCE).finish_reason == "length"


# ---- how it is sent


def test_a_long_prompts_logprobs_come_in_parts(client: Client, engine: Engine, monkeypatch: Any) -> None:
    monkeypatch.setattr(request_logprobs, "_SENT_AT_ONCE", 7)
    prompts, params = [list(range(3, 3 + length)) for length in (1, 2, 7, 8, 60)], settings(prompt_logprobs=2, n=2)
    for ours, theirs in zip(client.generate(prompts, params), engine.generate(prompts, params), strict=True):
        assert_equal(ours, theirs)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("at_once", [2**20, 700])
def test_hidden_states_and_what_hooks_emit_come_in_parts(
    client: Client, engine: Engine, at_once: int, monkeypatch: Any
) -> None:
    """For each answer, of several dtypes, and bit by bit; others' requests get none."""
    monkeypatch.setattr(emitted, "_SENT_AT_ONCE", at_once)

    def emit(module: Any, args: Any, output: Any, tokens: Any) -> None:
        tokens.emit("half", output.to(torch.bfloat16))
        tokens.emit("sign", output.sum(dim=-1) > 0)

    wanted: dict[str, Any] = {"hidden_states": [-1, 0], "emitted": ["sign", "half"]}
    prompts, params = [PROMPT, PROMPT[:1], PROMPT * 4], settings(n=2, prompt_logprobs=1)
    with compiled_llm.traced_hook(engine._model.model.norm, emit):
        both = client.generate(prompts, params, **wanted), engine.generate(prompts, params, **wanted)
        (without,) = client.generate([PROMPT], params)
        ended = client.submit(PROMPT, params, timeout=1e-9, **wanted).result(PATIENCE)
    for ours, theirs in zip(*both, strict=True):
        assert_equal(ours, theirs)
        for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert_tensors_equal(mine.hidden_states, other.hidden_states)
            assert_tensors_equal(mine.emitted, other.emitted)
    assert (without.hidden_states, without.emitted) == (None, None)
    assert ended.hidden_states is not None
    assert ended.emitted is not None
    assert [len(tensor) for tensor in (*ended.hidden_states.values(), *ended.emitted.values())] == [0] * 4
    with pytest.raises(ValueError, match=r"hidden_states=\[9\]: 9 is no layer"):
        client.submit(PROMPT, hidden_states=[9]).result(PATIENCE)
    with pytest.raises(ValueError, match="the model has no traced hooks"):
        client.submit(PROMPT, emitted=["sign"]).result(PATIENCE)


def assert_tensors_equal(ours: Any, theirs: Any) -> None:
    assert list(ours) == list(theirs)
    for key, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[key].dtype, theirs[key].shape)
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-3, atol=1e-3)


def test_a_step_is_one_frame_for_all_requests_of_a_client(engine: Engine, path: Path) -> None:
    with engine_in_thread(engine, path) as loop, Bytes(path) as peer:
        peer.greet()
        with engine.paused():
            peer.send(*(Submit(number, PROMPT, {"max_tokens": 30, "ignore_eos": True}) for number in range(8)))
            while engine._engine_thread.waiting < 8:
                loop.call(lambda: None)
        got: dict[int, int] = dict.fromkeys(range(8), 0)
        frames, ended = 0, 0
        while ended < 8:
            step = peer.receive()
            assert isinstance(step, StepUpdates)
            frames += 1
            ended += len(step.summaries)
            for update in step.updates:
                got[update.request] += len(update.tokens)
        assert got == dict.fromkeys(range(8), 30)
        assert frames <= engine.stats().steps


def test_the_engine_wakes_the_engine_process_once_a_step(client: Client, engine: Engine, engine_process: Loop) -> None:
    steps: list[int] = []
    wake, before = engine_process.server.wake, engine.stats().steps
    engine_process.server.wake = lambda: steps.append(engine.stats().steps) or wake()  # type: ignore[method-assign]
    client.generate([PROMPT] * 6, settings(max_tokens=20))
    assert len(steps) <= engine.stats().steps - before + 6  # and each request once as it begins and is cancelled


def test_tokens_come_while_the_event_loop_is_busy(client: Client, engine: Engine, engine_process: Loop) -> None:
    """The thread that has read them sends them; to wake another one would take longer."""
    (expected,) = client.generate([PROMPT], settings(max_tokens=40))
    is_busy, tokens_are_there, is_free = threading.Event(), threading.Event(), threading.Event()

    def be_busy() -> None:
        is_busy.set()
        tokens_are_there.wait(10.0)
        is_free.set()

    with engine.paused():
        handle = client.submit(PROMPT, settings(max_tokens=40))
        until(lambda: engine._engine_thread.waiting)
        threading.Thread(target=engine_process.call, args=(be_busy,)).start()
        assert is_busy.wait(PATIENCE)
    assert list(handle) == expected.token_ids
    assert not is_free.is_set()
    tokens_are_there.set()


# ---- whoever leaves, and whoever does not read


def test_cancelled_requests_end_with_what_they_have(client: Client) -> None:
    handle = client.submit(PROMPT, endless())
    first = next(iter(handle))
    handle.cancel()
    output = handle.result(PATIENCE)
    assert output.finish_reason == "cancelled"
    assert output.token_ids[0] == first
    several = client.submit(PROMPT, endless(n=2, max_tokens=200))
    several.cancel(index=1)
    assert [answer.finish_reason for answer in several.result(PATIENCE).outputs] == ["length", "cancelled"]
    several.cancel()
    text = client.stream(PROMPT, endless())
    for _ in text:
        break
    assert text.handle.result(PATIENCE).finish_reason == "cancelled"


def test_a_client_that_leaves_takes_its_requests_along(engine: Engine, engine_process: Loop, path: Path) -> None:
    with Client(path) as stays:
        others = [Client(path) for _ in range(2)]
        handles = [client.submit(PROMPT, endless(seed=seed)) for seed, client in enumerate((*others, stays))]
        for handle in handles:
            next(iter(handle))
        ended = engine_ends(engine, 2)
        for client in others:
            client.close()
        assert ended.wait(PATIENCE)
        assert engine.stats().running == 1
        for handle in handles[:2]:
            with pytest.raises(EngineDeadError, match="the client is closed"):
                handle.result(PATIENCE)
        handles[2].cancel()
        assert handles[2].result(PATIENCE).finish_reason == "cancelled"
        assert len(handles[2].output().token_ids) < 900


def test_a_client_that_reads_no_more_but_might_write_is_left(engine: Engine, engine_process: Loop, path: Path) -> None:
    with Bytes(path) as deaf:
        deaf.greet()
        ended = engine_ends(engine, 1)
        deaf.send(Submit(1, PROMPT, {"max_tokens": 900, "ignore_eos": True}))
        deaf.socket.shutdown(socket.SHUT_RD)
        until(lambda: not engine_process.server._connections)
        assert ended.wait(PATIENCE)
        with pytest.raises(BrokenPipeError):
            deaf.send(AskStats(2))
    assert engine.stats().new_tokens < 900


def test_it_is_busy_until_the_last_tokens_are_in_the_socket(engine_process: Loop, path: Path, monkeypatch: Any) -> None:
    written, goes_on = threading.Event(), threading.Event()

    def slowly(message: Any) -> bytearray:
        if isinstance(message, StepUpdates) and message.summaries:
            written.set()
            assert goes_on.wait(PATIENCE)
        return frame_of(message)

    monkeypatch.setattr(connection, "frame_of", slowly)
    with Client(path) as client:
        handle = client.submit(PROMPT, settings())
        assert written.wait(PATIENCE)
        (talks,) = engine_process.server._connections
        assert not talks.streams
        assert talks.busy
        goes_on.set()
        assert handle.result(PATIENCE).finish_reason == "length"
        until(lambda: not talks.busy)


def test_a_client_that_nobody_holds_leaves(engine_process: Loop, path: Path) -> None:
    client = Client(path)
    client.generate([PROMPT], settings())
    with Client(path) as other:
        assert other.stats().connections == 2
        del client
        gc.collect()
        until(lambda: other.stats().connections != 2)


def engine_ends(engine: Engine, count: int) -> threading.Event:
    """An event that is set when so many more requests have ended."""
    ended, before, end = threading.Event(), engine.stats().finished, engine._engine_thread.request_table.notify

    def notify(changed: Any) -> bool:
        has_ended = end(changed)
        if engine.stats().finished >= before + count:
            ended.set()
        return has_ended

    engine._engine_thread.request_table.notify = notify  # type: ignore[method-assign]
    return ended


@pytest.mark.whole
def test_a_slow_reader_gets_merged_frames_and_loses_nothing(engine: Engine, engine_process: Loop, path: Path) -> None:
    params = {"max_tokens": 300, "ignore_eos": True, "seed": 5, "logprobs": 20}
    with Bytes(path) as slow:
        slow.greet()
        ended = engine_ends(engine, 2)
        slow.send(Submit(1, PROMPT, params))
        with Client(path, tokenizer=byte_level()) as quick:
            (beside,) = quick.generate([PROMPT], settings())
        assert ended.wait(PATIENCE)
        frames, tokens, done = [], [], False
        while not done:
            step = slow.receive()
            assert isinstance(step, StepUpdates)
            frames.append(len(step.updates[0].tokens))
            tokens += step.updates[0].tokens
            done = bool(step.summaries)
    assert_equal(beside, *engine.generate([PROMPT], settings()))
    assert tokens == engine.generate([PROMPT], SamplingParams(**params))[0].token_ids
    assert max(frames) > 30  # what came while nobody read


def test_a_reader_that_is_too_slow_loses_its_requests_with_the_reason(engine: Engine, path: Path) -> None:
    params = {"max_tokens": 900, "ignore_eos": True, "logprobs": 20}
    with engine_in_thread(engine, path, max_unsent=50), Bytes(path) as slow, Client(path) as quick:
        slow.greet()
        ended = engine_ends(engine, 1)
        slow.send(Submit(1, PROMPT, params))
        assert ended.wait(PATIENCE)
        assert quick.generate([PROMPT], settings())[0].finish_reason == "length"
        end = None
        while end is None:
            step = slow.receive()
            assert isinstance(step, StepUpdates)
            end = step.updates[0].ended
        assert end.finish_reason == "error"
        assert end.error == "the client has not read, and more than 50 tokens wait for it"
        slow.send(Submit(1, PROMPT, {"max_tokens": 1}))  # it may go on
        assert isinstance(slow.receive(), StepUpdates)


# ---- before and after


def test_clients_are_told_what_an_engine_process_does_before_it_is_ready(engine: Engine, path: Path) -> None:
    loop = Loop(path)
    with Client(path, tokenizer=byte_level(), wait=False) as client, Bytes(path) as peer:
        assert client.doing == "starting"
        for call in (lambda: client.submit(PROMPT), client.stats):
            with pytest.raises(EngineProcessError, match="the engine process is not ready"):
                call()
        peer.send(b"\x00\x00\x00\x0c\x81\xa4type\xa5hello")  # without a version, it is this one
        loop.server.report("loading weights", 1, 3)
        with pytest.raises(TimeoutError, match="not ready after 0"):
            client.wait_until_ready(0.001)
        peer.send(Submit(1, PROMPT))
        assert isinstance(peer.receive(), Welcome)
        while isinstance(loss_reported := peer.receive(), Preparing):
            told = loss_reported
        assert told == Preparing("loading weights", 1, 3)
        until(lambda: client.progress == (1, 3))
        assert loss_reported == Refused(1, "unavailable", "the engine process is not ready (loading weights)")
        loop.open(engine)
        assert client.wait_until_ready(PATIENCE).eos_token_ids == [1]
        assert (client.doing, client.progress) == ("ready", None)
        assert client._session._line.welcome.package == f"compiled-llm {compiled_llm.__version__}"
        assert_equal(*client.generate([PROMPT], settings()), *engine.generate([PROMPT], settings()))
    loop.close()


def test_an_engine_process_that_leaves_lets_requests_end(engine: Engine, path: Path) -> None:
    with engine_in_thread(engine, path) as loop, Client(path) as client:
        handle = client.submit(PROMPT, settings(max_tokens=300))
        next(iter(handle))
        loop.call(loop.server.stop_accepting, "the engine process was told to end")
        assert not path.exists()
        with pytest.raises(EngineProcessError, match="told to end"):
            client.submit(PROMPT, settings()).result(PATIENCE)
        with pytest.raises(EngineDeadError, match="there is no such socket"):
            Client(path)
        loop.run(loop.server.drain(PATIENCE))
        assert handle.result(PATIENCE).finish_reason == "length"
        until(lambda: client._session.lost is not None)
        assert (
            str(client._session.lost)
            == "the engine process has ended the connection: the engine process was told to end"
        )


def test_an_engine_process_ends_though_its_folder_is_gone(engine: Engine, folder: Path) -> None:
    path = folder / "inner" / "socket"
    with engine_in_thread(engine, path) as loop, Client(path) as client:
        path.unlink()
        path.parent.rmdir()
        loop.call(loop.server.stop_accepting, "the engine process was told to end")
        with pytest.raises(EngineProcessError, match="told to end"):
            client.submit(PROMPT, settings()).result(PATIENCE)


def test_what_has_not_ended_when_time_is_up_says_so(engine: Engine, path: Path) -> None:
    with engine_in_thread(engine, path) as loop, Client(path) as client:
        handle = client.submit(PROMPT, endless())
        next(iter(handle))
        loop.call(loop.server.stop_accepting, "the engine process was told to end")
        loop.run(loop.server.drain(0.0))
        with pytest.raises(EngineProcessError, match="told to end, and the request has not ended 0 s later"):
            handle.result(PATIENCE)
        assert len(handle.output().token_ids) >= 1


def test_stats_are_the_engines(client: Client, engine: Engine) -> None:
    client.generate([PROMPT] * 3, settings())
    ours, theirs = client.stats(), engine.stats()
    for name in ours.__struct_fields__:
        if name not in ("number", "connections"):
            assert_same_figures(getattr(ours, name), getattr(theirs, name))
    assert set(theirs.__dataclass_fields__) == set(ours.__struct_fields__) - {"number", "connections"}
    assert ours.connections == 1
    assert ours.pages is not None
    assert ours.pages.used == 0


def test_pages_are_counted_before_the_first_request(client: Client) -> None:
    pages = client.stats().pages
    assert pages is not None
    assert pages.free == pages.total > 0


def assert_same_figures(ours: Any, theirs: Any) -> None:
    if hasattr(theirs, "_asdict"):
        found = {name: getattr(ours, name) for name in theirs._fields}
        assert found == {
            name: list(value) if isinstance(value, tuple) else value for name, value in theirs._asdict().items()
        }
    else:
        assert ours == theirs


def test_a_request_number_can_be_used_again_once_it_has_ended(engine_process: Loop, path: Path) -> None:
    with Bytes(path) as peer:
        peer.greet()
        for _ in range(2):
            peer.send(Submit(7, PROMPT, {"max_tokens": 1}), Cancel(99))
            while not (isinstance(step := peer.receive(), StepUpdates) and step.summaries):
                assert step is not None
        peer.send(Submit(7, PROMPT, {"max_tokens": 800, "ignore_eos": True}), Submit(7, PROMPT))
        assert peer.problem() == "a second request number 7, and the first has not ended"


# ---- faults of the model


def test_a_step_that_fails_is_told_without_its_files(client: Client, engine: Engine, monkeypatch: Any) -> None:
    handle = client.submit(PROMPT, endless())
    next(iter(handle))
    with engine.paused():
        fail_once(monkeypatch, engine._engine_thread.loop, "step", OSError("/home/me/secret"), after=1)
    with pytest.raises(
        EngineProcessError, match=r"^the request has failed of OSError; the engine process's log says more$"
    ):
        handle.result(PATIENCE)
    assert_equal(*client.generate([PROMPT], settings()), *engine.generate([PROMPT], settings()))


def test_a_device_that_fails_ends_all_requests_and_the_engine_process_hears_of_it(path: Path, monkeypatch: Any) -> None:
    model: Any = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1), mode="eager", kv_memory="4000 tokens")
    lost = threading.Event()
    with Engine(model, max_num_seqs=1) as engine, engine_in_thread(engine, path) as loop, Client(path) as client:
        loop.server.when_lost = lost.set
        running, waiting = client.submit(PROMPT, endless()), client.submit(PROMPT, endless())
        next(iter(running))
        with engine.paused():
            error = torch.AcceleratorError("CUDA error: device-side assert triggered")
            fail_once(monkeypatch, engine._engine_thread.loop, "step", error, after=1)
        for handle in (running, waiting):
            with pytest.raises(EngineProcessError, match=r"the device has failed \(device-side assert triggered\)"):
                handle.result(PATIENCE)
        assert lost.wait(PATIENCE)
        with pytest.raises(EngineProcessError, match="the device has failed"):
            client.generate([PROMPT], settings())
