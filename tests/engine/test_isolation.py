"""What goes wrong with one request, call or engine stays there: others get their tokens, and all pages come back."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.engine.thread import starvation
from compiled_llm.execution.decode.decode_step import DecodeStep
from compiled_llm.execution.steps.launch import Launch
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.structured_outputs import StructuredOutputsParams
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import PATIENCE, greedy, huggingfaces, tiny, wrapped
from support.execution.failing_calls import fail_once
from support.parity import alone, assert_account_is_empty

PROMPT = list(range(3, 60))


PAGES = {"page_size": 16}


@pytest.fixture
def model() -> PreTrainedModel:
    return wrapped(4000, **PAGES)


def loop_of(engine: Engine) -> Loop:
    assert engine._engine_thread.loop is not None
    return engine._engine_thread.loop


def train(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Write other weights into the model, and return a plain one that has them."""
    other = tiny(seed)
    with torch.no_grad():
        model.load_state_dict(other.state_dict())
    return other


PLACES = [
    "ready",
    "upload",
    "decode",
    "repeated decode",
    "prefill",
    "settings",
    "start_reading",
    "read",
    "plan",
    "launched",
]


def place_of(model: PreTrainedModel, engine: Engine, name: str) -> tuple[Any, str]:
    model_runner, loop = model.compiled.model_runner(), loop_of(engine)
    return {
        "ready": (model_runner.steps, "ready"),
        "upload": (model_runner.state.staging, "upload"),
        "decode": (Launch, "__call__"),
        "repeated decode": (DecodeStep, "launch"),
        "prefill": (model_runner.prefill, "run"),
        "settings": (model_runner.state.slots, "admit"),
        "start_reading": (model_runner.readbacks, "start"),
        "read": (loop.scheduler, "read"),
        "plan": (loop.scheduler, "plan"),
        "launched": (loop.scheduler, "launched"),
    }[name]


@pytest.mark.drawn(most=5)
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_each_call_into_the_device_may_fail_once(monkeypatch, one_thread, place, kind):
    """Requests that run fail with it, or none if it is Ctrl-C; later ones are right, and nothing is lost."""
    monkeypatch.setattr(Loop, "asynchronous", True)
    model, prompts = wrapped(4000, **PAGES, prefill_tokens=32), [PROMPT, PROMPT[:20], [5, 6, 7]]
    params = [greedy(6), SamplingParams(temperature=0.9, seed=3, max_tokens=6, n=2), greedy(6)]
    with Engine(model) as engine:
        expected = [output.outputs[-1].token_ids for output in engine.generate(prompts, params)]
        assert [expected[0], expected[2]] == [huggingfaces(prompt, 6) for prompt in (prompts[0], prompts[2])]
        for once_done in (False, True):
            engine.reset_prefix_cache()
            with monkeypatch.context() as patch:
                fail_once(patch, *place_of(model, engine, place), kind("planted"), after=2, once_done=once_done)
                with pytest.raises(kind, match="planted"):
                    engine.generate(prompts, params)
            assert engine.stats().running == engine.stats().waiting == 0
            account = model.compiled.stats().pages
            assert (account.used, account.free + account.cached) == (0, account.total)
            assert [output.outputs[-1].token_ids for output in engine.generate(prompts, params)] == expected
        assert len(model.compiled.model_runner().state.slots._free) == 2 * 256
    assert_account_is_empty(model)


def test_ctrl_c_while_the_device_has_failed_ends_requests(model, engine, monkeypatch):
    monkeypatch.setattr(Loop, "asynchronous", True)
    engine.generate(PROMPT, greedy(2))
    handle = engine.submit(PROMPT, greedy(900))
    next(iter(handle))
    with engine.paused(weights_stay=True):
        loop = loop_of(engine)
        engine._engine_thread._restart(loop, KeyboardInterrupt())  # between two steps
    with monkeypatch.context() as patch:
        fail_once(patch, loop.scheduler, "read", RuntimeError("planted"), after=2)
        with pytest.raises(RuntimeError, match="planted"):
            handle.result(PATIENCE)
    assert engine.generate(PROMPT, greedy(4))[0].token_ids == huggingfaces(PROMPT, 4)


# ---- the prefix cache


def test_what_ran_while_weights_changed_leaves_nothing_in_the_prefix_cache(model, engine):
    handle = engine.submit(PROMPT, greedy(900))
    tokens = iter(handle)
    next(tokens)
    with engine.paused():
        other = train(model, seed=9)
        got = len(handle.requests[0].tokens)
    for _ in range(got + 3):  # the model has been looked at since
        next(tokens)
    handle.cancel()
    handle.result(PATIENCE)
    assert engine.generate(PROMPT, greedy(8))[0].token_ids == alone(other, PROMPT, 8)


def test_the_model_is_looked_at_when_work_begins(model, engine, reading):
    """Also where the first step is launched before all of the model has been compared."""
    for seed in (5, 6, 7):  # in less than a tenth of a second
        other = train(model, seed)
        cached = engine.stats().cached_tokens
        for new in (1, 6):
            assert engine.generate(PROMPT, greedy(new))[0].token_ids == alone(other, PROMPT, new)
        assert engine.stats().cached_tokens > cached, "what was computed since is kept"


def test_a_step_of_a_model_that_had_changed_leaves_nothing(model, engine, monkeypatch, seed):
    """Draws of several answers and scores of a prompt: all is computed again."""
    monkeypatch.setattr(Loop, "asynchronous", True)
    drawn = SamplingParams(max_tokens=6, n=2, seed=seed, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=1, logprobs=1)

    def answers(engine: Engine) -> tuple[list[list[int]], list[float]]:
        outputs = engine.generate([PROMPT] * 3, [drawn, scored, greedy(3)])
        places = [*(outputs[1].prompt_logprobs or ())[1:], *(outputs[1].outputs[0].logprobs or ())]
        tokens = [answer.token_ids for output in outputs for answer in output.outputs]
        return tokens, [round(entry.logprob, 3) for place in places for entry in (place or {}).values()]

    before = answers(engine)
    train(model, seed=6)
    again = wrapped(4000, **PAGES)
    train(again, seed=6)
    with Engine(again) as other:
        expected = answers(other)
    assert expected != before
    assert answers(engine) == expected


def test_an_engine_trusts_nothing_that_a_forgotten_one_has_left(model, one_thread):
    Engine(model).generate(PROMPT, greedy(2))
    gc.collect()
    other = train(model, seed=9)
    with Engine(model) as engine:
        output = engine.generate(PROMPT, greedy(8))[0]
        assert (output.cached_tokens, output.token_ids) == (0, alone(other, PROMPT, 8))
        assert engine.generate(PROMPT, greedy(2))[0].cached_tokens == 48


# ---- requests end alone, in the midst of a prompt too


SCORED = SamplingParams(max_tokens=0, prompt_logprobs=1)


@pytest.mark.parametrize(("end", "params"), [("cancelled", greedy(4)), ("cancelled", SCORED), ("timeout", greedy(4))])
def test_a_request_that_ends_in_the_midst_of_its_prompt_gives_its_pages_back(one_thread, monkeypatch, end, params):
    monkeypatch.setattr(Loop, "asynchronous", True)
    model = wrapped(4000, prefill_tokens=16, **PAGES)
    with Engine(model, prefix_cache=False) as engine:
        engine.generate([5], greedy(1))
        with engine.paused():
            loop = loop_of(engine)
            long = engine.submit(list(range(3, 120)) * 4, params)
            other = engine.submit(PROMPT[:9], greedy(30))
            step, first = loop.step, loop.steps

            def watched(look: bool) -> Any:
                if loop.steps == first + 4 and end == "cancelled":
                    long.cancel()
                elif loop.steps == first + 4:
                    long.requests[0].deadline = loop.scheduler.next_deadline = engine._engine_thread._due = 0.0
                return step(look)

            monkeypatch.setattr(loop, "step", watched)
        output = long.result(PATIENCE)
        assert (output.finish_reason, output.token_ids) == (end, [])
        assert loop.steps < first + 12, "its prompt has 30 chunks"
        assert other.result(PATIENCE).token_ids == huggingfaces(PROMPT[:9], 30)
    assert_account_is_empty(model)


def test_smaller_priorities_run_first(model, one_thread):
    with Engine(model, max_num_seqs=1) as engine:
        with engine.paused():
            handles = {value: engine.submit([5, 6, 7 + value], greedy(2), priority=value) for value in (2, 0, 1, -1)}
        ends = {value: handle.result(PATIENCE) and handle.requests[0].finished for value, handle in handles.items()}
    assert sorted(ends, key=lambda value: ends[value] or 0) == [-1, 0, 1, 2]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_answers_of_one_prompt_share_its_prefill(model, one_thread, prefix_cache):
    with Engine(model, prefix_cache=prefix_cache) as engine:
        engine.generate(PROMPT, SamplingParams(n=4, max_tokens=3, seed=1))
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.cached_tokens) == (4 * 57, 3 * 48)


def asked(engine: Engine, params: SamplingParams) -> None:
    next(iter(engine.submit(PROMPT, params)))


def idle(engine: Engine) -> None:
    engine.submit(PROMPT, greedy(2)).result(PATIENCE)


def asleep(engine: Engine) -> None:
    asked(engine, greedy(900))
    engine.sleep()


def waiting_for_a_grammar(engine: Engine) -> None:
    pytest.importorskip("xgrammar")
    engine.submit(PROMPT, SamplingParams(structured_outputs=StructuredOutputsParams(regex="a" * 3000)))


BEFORE: dict[str, Callable[[Engine], Any]] = {
    "new": lambda engine: None,
    "idle": idle,
    "running": lambda engine: asked(engine, greedy(900)),
    "with texts": lambda engine: asked(engine, greedy(30, stop="\0\0")),
    "asleep": asleep,
    "waiting for a grammar": waiting_for_a_grammar,
}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("before", BEFORE)
def test_a_forgotten_engine_ends_with_its_model(one_thread, before):
    def threads() -> list[threading.Thread]:
        names = ("compiled_llm engine", "compiled_llm output")
        return [thread for thread in threading.enumerate() if thread.name in names]

    engine, others = Engine(wrapped(plain=tiny(vocab_size=380), **PAGES), tokenizer=byte_level()), len(threads())
    BEFORE[before](engine)
    kept = [weakref.ref(thing) for thing in (engine, engine._engine_thread, engine._model)]
    del engine
    deadline = time.monotonic() + 20
    while (any(reference() for reference in kept) or len(threads()) > others) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert [reference() for reference in kept] == [None] * 3
    assert len(threads()) == others


# ---- callers


def test_an_event_loop_that_is_closed_fails_no_other_request(engine):
    loop = asyncio.new_event_loop()

    async def first() -> Any:
        tokens = engine.submit(PROMPT, greedy(900)).__aiter__()
        await tokens.__anext__()
        return tokens

    left = loop.run_until_complete(first())
    loop.close()
    assert engine.submit(PROMPT, greedy(4)).result(PATIENCE).token_ids == huggingfaces(PROMPT, 4)
    del left


def test_inside_a_pause_the_model_generates_and_the_engine_refuses(engine, model):
    handle = engine.submit(PROMPT, greedy(120))
    next(iter(handle))
    with engine.paused(weights_stay=True):
        assert alone(model, PROMPT[:9], 4) == huggingfaces(PROMPT[:9], 4)
        for call in (
            engine.reset_prefix_cache,
            engine.close,
            engine.sleep,
            engine.wake,
            lambda: engine.update_weights("weights"),
            lambda: engine.generate(PROMPT),
        ):
            with pytest.raises(RuntimeError, match="paused, or running, in this thread"):
                call()
    assert handle.result(PATIENCE).token_ids == huggingfaces(PROMPT, 120)


def test_how_a_request_waits_is_checked_before_it_does(engine):
    for options in ({"priority": "high"}, {"timeout": -1}, {"timeout": float("nan")}, {"cache_salt": {}}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}="):
            engine.submit(PROMPT, **options)  # type: ignore[arg-type]
    assert engine.submit(PROMPT, greedy(2)).result(PATIENCE).finish_reason == "length"


# ---- pages, and what is remembered


def kept_cache(model: PreTrainedModel, prompt: list[int], tokens: int) -> Any:
    """The result of a call, with its cache."""
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=tokens, return_dict_in_generate=True, do_sample=False)


def test_a_call_that_kept_caches_leave_no_room_for_is_refused_and_the_engine_goes_on(one_thread):
    model, prompt = wrapped(160), PROMPT[:14]  # 40 pages
    kept = kept_cache(model, prompt, 78)  # 23 of them
    with Engine(model, max_num_seqs=1) as engine:
        handles = [engine.submit(prompt, greedy(50)) for _ in range(3)]  # 16 each
        next(iter(handles[0]))
        with pytest.raises(ValueError, match="pages of 4 tokens"):
            alone(model, prompt, 70, return_dict_in_generate=True, output_logits=True)
        assert {handle.result(PATIENCE).finish_reason for handle in handles} == {"length"}
    del kept
    gc.collect()
    assert_account_is_empty(model)


def test_a_request_that_waits_for_kept_pages_is_reported(monkeypatch, one_thread, caplog):
    monkeypatch.setattr(starvation, "_LONG", 0.05)
    model = wrapped(160)  # 40 pages
    kept = kept_cache(model, PROMPT[:14], 78)  # 23 of them
    with Engine(model, max_num_seqs=1) as engine:
        handle = engine.submit(list(range(3, 100)), greedy(4))
        deadline = time.monotonic() + 20
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
        assert alone(model, PROMPT[:9], 4)  # others go on
        time.sleep(0.1)
        (said,) = [message for message in caplog.messages if "next request has waited" in message]
        assert "it needs 25 pages, and 17 of 40 are available; drop caches" in said
        del kept
        gc.collect()
        assert handle.result(PATIENCE).finish_reason == "length"


def test_pages_that_leak_are_reported_and_freed(model, engine, monkeypatch, caplog):
    engine.generate(PROMPT, greedy(2))
    assert not caplog.messages
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_free", lambda self, row: None)
        patch.setattr(Loop, "free_leaks", lambda self: None)
        engine.generate(PROMPT[:9], greedy(2))
    assert model.compiled.stats().pages.used == 1
    engine.generate(PROMPT, greedy(2))
    assert "still had 1 pages and 1 slots" in caplog.text
    assert model.compiled.stats().pages.used == 0


def test_requests_of_one_token_are_not_remembered(engine):
    for token in range(3, 30):
        engine.generate([5, 6, token], greedy(1))
    loop = loop_of(engine)
    slots = loop.model_runner.state.slots
    assert (loop._pipeline.persistent.step, len(slots._free)) == (None, slots.padding)


@pytest.mark.parametrize("late", [False, True])
def test_a_step_is_read_after_the_next_is_launched_whatever_it_runs(monkeypatch, one_thread, late):
    """Chunks inside a prompt included: they are not waited for, and no last token waits for another's prompt."""
    monkeypatch.setattr(Loop, "asynchronous", late)
    model, unread, read = wrapped(4000, prefill_tokens=16, **PAGES), list[int](), list[int]()
    with Engine(model) as engine:
        engine.generate([5])
        with engine.paused():
            short, long = engine.submit([5, 6], greedy(2)), engine.submit(list(range(3, 120)) * 4, greedy(1))
            loop = loop_of(engine)
            before, step = loop.steps, loop.step

            def watched(look: bool) -> Any:
                launched = loop.steps
                changed = step(look)
                if loop.steps > launched:
                    unread.append(len(loop._pipeline.unread))
                return changed

            monkeypatch.setattr(loop, "step", watched)
            short.when_changed(lambda: read.append(loop.steps - before))
        long.result(PATIENCE)
    assert set(unread) == {int(late)}
    assert read[-1] <= 3
