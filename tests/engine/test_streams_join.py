"""Calls of ``generate`` with a streamer run in the batch of an engine that is busy, and are streamed as alone."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.loop import Loop
from support.characters import character_tokenizer
from support.engine.tiny_engines import PATIENCE, greedy, huggingfaces, tiny, wrapped
from support.in_threads import start
from support.parity import assert_account_is_empty, mixed_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[5, 6, 7, 8, 9], [9, 10, 11], [40, 41], [70], [3, 4, 5, 6]]
BESIDE, LONG = [50, 51, 52], 300


class Notes(BaseStreamer):
    """Notes what it gets, and calls something at one of the tokens."""

    leaves_model_alone = True

    def __init__(self, at: int = -1, call: Callable[[], object] = lambda: None) -> None:
        self.seen: list[Any] = []
        self._at, self._call = at, call

    def put(self, value: Tensor) -> None:
        self.seen.append((value.dtype, value.device, value.tolist()))
        if len(self.seen) == self._at:
            self._call()

    def end(self) -> None:
        self.seen.append("end")


class Own(Notes):
    """May change the model, as far as we know."""

    leaves_model_alone = False


def generated(model: Any, prompt: list[int], tokens: int, streamer: Any, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": tokens, **options}
    return model.generate(ids, streamer=streamer, **given)[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


class Busy:
    """An engine with a request, which runs as many steps as it is let, and one whenever it is about to pause."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.rows, self._steps, step = engine, list[int](), 0.0, Loop.step

        def held(loop: Loop, *args: Any) -> Any:
            over = time.monotonic() + PATIENCE
            while not (self._steps or engine._engine_thread.step_lock.pausing or time.monotonic() > over):
                time.sleep(0.001)
            self._steps = max(0, self._steps - 1)
            self.rows.append(len(loop.scheduler.running))
            return step(loop, *args)

        monkeypatch.setattr(Loop, "step", held)
        self.beside = engine.submit(BESIDE, greedy(LONG))

    def let(self, steps: float = math.inf) -> None:
        self._steps = steps

    def await_requests(self, count: int) -> None:
        over = time.monotonic() + PATIENCE
        while len(self.engine._engine_thread.request_table) < count:
            assert time.monotonic() < over


@pytest.fixture
def model(reading: None) -> Any:
    return wrapped(4000)


@pytest.fixture
def busy(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Busy]:
    with Engine(model) as engine:
        busy = Busy(engine, monkeypatch)
        yield busy
        busy.let()
        if not engine.closed:
            assert busy.beside.result(PATIENCE).token_ids == huggingfaces(BESIDE, LONG)
    assert_account_is_empty(model)


def test_five_threads_with_text_streamers_run_at_once(model: Any, busy: Busy) -> None:
    words = character_tokenizer()
    streamers: list[Any] = [TextIteratorStreamer(words, timeout=PATIENCE) for _ in PROMPTS]
    calls = [
        start(lambda prompt=prompt, streamer=streamer: generated(model, prompt, 40, streamer))
        for prompt, streamer in zip(PROMPTS, streamers, strict=True)
    ]
    busy.await_requests(6)
    busy.let()
    for prompt, streamer, call in zip(PROMPTS, streamers, calls, strict=True):
        expected = huggingfaces(prompt, 40)
        assert "".join(streamer) == words.decode([*prompt, *expected])
        assert call.result(PATIENCE) == expected
    assert max(busy.rows) == 6
    assert model.compiled.stats().generate_calls == {"engine": 5}


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("lengths", [[5], [4, 9, 6]])
def test_a_streamer_gets_what_huggingface_gives_it(model: Any, busy: Busy, lengths: list[int], seed: int) -> None:
    inputs, plain = mixed_prompts(lengths, 128, seed), tiny()
    free = plain.generate(**inputs, max_new_tokens=12, do_sample=False)
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": free[:, -3].tolist()}
    busy.let()
    seen = []
    for each in (plain, model):
        notes = Notes()
        out = each.generate(**inputs, **options, streamer=notes)
        seen.append([*notes.seen, out.tolist()])
    assert seen[1] == seen[0]
    assert model.compiled.stats().generate_calls == {"engine": 1}


def test_what_may_change_the_model_sees_each_step_before_the_next(model: Any, busy: Busy) -> None:
    busy.let()
    assert generated(model, PROMPTS[0], 5, Own()) == huggingfaces(PROMPTS[0], 5)
    assert model.compiled.stats().generate_calls == {"fast loop": 1}


def test_a_streamer_that_raises_ends_its_own_row_and_raises_in_its_caller(model: Any, busy: Busy) -> None:
    error = ValueError("enough")

    def fail() -> None:
        raise error

    failing = Notes(4, fail)
    calls = [start(lambda: generated(model, PROMPTS[0], 900, failing))]
    calls.append(start(lambda: generated(model, PROMPTS[1], 40, Notes())))
    busy.await_requests(3)
    busy.let()
    assert calls[0].exception(PATIENCE) is error
    assert len(failing.seen) == 4
    assert calls[1].result(PATIENCE) == huggingfaces(PROMPTS[1], 40)
    assert busy.beside.result(PATIENCE).finish_reason == "length"
    while len(busy.engine._engine_thread.request_table):  # the row has not gone on to its end
        assert max(map(len, (request.tokens for request in busy.engine._engine_thread.request_table))) < 900


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("where", ["in a streamer", "while it waits"])
def test_an_interrupt_ends_the_row_of_the_main_threads_call(model: Any, busy: Busy, where: str) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    def interrupt_a_call_that_waits() -> None:
        busy.await_requests(2)
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    waiting = where == "while it waits"
    if waiting:
        start(interrupt_a_call_that_waits)
    else:
        busy.let()
    with pytest.raises(KeyboardInterrupt):
        generated(model, PROMPTS[0], 900, Notes() if waiting else Notes(4, interrupt))
    busy.let()
    assert busy.beside.result(PATIENCE).finish_reason == "length"
    assert generated(model, PROMPTS[1], 9, Notes()) == huggingfaces(PROMPTS[1], 9)


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 1.5},
        {"repetition_penalty": 1.7, "eos_token_id": 7},
        {"eos_token_id": list(range(64)), "min_new_tokens": 30},
    ],
    ids=lambda options: "+".join(options) or "greedy",
)
def test_a_stream_whose_engine_closes_goes_on_where_it_was(model: Any, busy: Busy, options: dict[str, Any]) -> None:
    def run(streamer: Any) -> list[int]:
        torch.manual_seed(5)
        return generated(model, PROMPTS[0], 60, streamer, **options)

    notes = Notes(9, busy.engine.close)
    call = start(lambda: run(notes))
    busy.await_requests(2)
    busy.let(20)  # so that it does not come to its end
    streamed = call.result(PATIENCE)
    assert model.compiled.stats().generate_calls == {"fast loop": 1}
    alone = Notes()
    assert streamed == run(alone)
    assert notes.seen == alone.seen
    assert len(streamed) > 20


def test_a_streamer_may_pause_the_engine_that_runs_its_call(model: Any, busy: Busy) -> None:
    def pause() -> None:
        with busy.engine.paused(weights_stay=True):
            assert not busy.beside.done

    busy.let()
    notes = Notes(4, pause)
    assert generated(model, PROMPTS[0], 9, notes) == huggingfaces(PROMPTS[0], 9)
    assert notes.seen[-1] == "end"
