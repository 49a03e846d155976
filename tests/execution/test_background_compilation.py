"""Answers run uncompiled at first, and what is compiled in the background takes over between two of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TextStreamer

import compiled_llm
from compiled_llm.compilation.backend import Inductor
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.execution.lifecycle import background_compilation
from compiled_llm.execution.lifecycle.background_compilation import BackgroundCompilation
from support.compilation.compile_gate import Gate
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread", "without_inductor")]

OPTIONS: dict[str, Any] = {"max_batch_size": 4, "kv_memory": "2000 tokens", "progress": False}
LENGTHS = [5, 3]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


def plain(seed: int = 0) -> Any:
    return tiny_qwen3(seed, eos_token_id=None, num_hidden_layers=1)


SETTINGS = compiled_llm.SamplingParams(max_tokens=12, temperature=0.0)


def expected_tokens(prompt: list[int], seed: int = 0, tokens: int = 12) -> list[int]:
    """What HuggingFace says with the weights of a seed."""
    return greedy(plain(seed), {"input_ids": torch.tensor([prompt])}, tokens)[0, len(prompt) :].tolist()


def eager_first(**options: Any) -> Any:
    return compiled_llm.wrap(plain(), eager_first=True, **OPTIONS, **options)


def compilation_of(model: Any) -> BackgroundCompilation:
    compiling = model.compiled.runner_lifecycle.compiling
    assert isinstance(compiling, BackgroundCompilation)
    return compiling


def compile_to_the_end(model: Any, gate: Gate) -> None:
    gate.opened.set()
    compilation_of(model).wait()


def is_eager(model: Any) -> bool:
    eager = model.compiled.model_runner().graph_manager.eager
    assert eager is not any(model.compiled.graphs.values())
    return bool(eager)


def test_answers_are_the_same_before_and_after_compiled_programs_take_over(gate: Gate, seed: int) -> None:
    model, inputs = eager_first(), mixed_prompts(LENGTHS, 128, seed)
    one = mixed_prompts(LENGTHS[:1], 128, seed)
    expected = [greedy(plain(), each, 12) for each in (inputs, one)]

    def assert_answers() -> None:
        for each, tokens in zip((inputs, one), expected, strict=True):
            torch.testing.assert_close(greedy(model, each, 12), tokens)

    model.compiled.warmup([1, 2])  # which does not wait
    assert_answers()
    assert is_eager(model)
    compile_to_the_end(model, gate)
    assert_answers()
    assert not is_eager(model)
    assert set(model.compiled.graphs.values()) == {1}
    assert model.compiled.stats().recompiles == 0
    assert model.compiled.events.cold_starts == []
    assert gate.times == 3


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_says_that_it_answers_uncompiled_until_new_answers_do_not(gate: Gate, fails: bool) -> None:
    gate.error = RuntimeError("no compiler") if fails else None
    with compiled_llm.Engine(eager_first(), max_num_seqs=2) as engine:
        assert engine.uncompiled is engine.stats().uncompiled is None, "nothing was asked for"
        engine.warmup([1])
        assert engine.uncompiled == engine.stats().uncompiled == "compiling"
        engine.generate([[3, 4, 5]], SETTINGS)
        assert engine.uncompiled == "compiling"
        compile_to_the_end(engine._model, gate)
        expected = "failed" if fails else None
        assert engine.uncompiled == engine.stats().uncompiled == expected
        engine.generate([[3, 4, 5]], SETTINGS)
        assert engine.uncompiled == engine.stats().uncompiled == expected
        assert is_eager(engine._model) == fails


@pytest.mark.whole
def test_steps_that_guess_are_compiled_with_the_others_and_no_request_waits_for_them(gate: Gate) -> None:
    prompt, settings = [5, 6, 5, 6, 5], compiled_llm.SamplingParams(max_tokens=40, temperature=0.0)
    with compiled_llm.Engine(eager_first(), max_num_seqs=2, speculative_config={"method": "ngram"}) as engine:
        engine.warmup([1])
        expected = engine.generate([prompt], settings)[0].token_ids
        compile_to_the_end(engine.model, gate)
        compiled, before = gate.times, engine.stats().drafts
        assert engine.generate([prompt], settings)[0].token_ids == expected
        assert not is_eager(engine.model)
        after = engine.stats().drafts
        assert after is not None
        assert before is not None
        assert after.drafts > before.drafts
        assert gate.times == compiled
        assert engine.model.compiled.stats().recompiles == 0


@pytest.mark.whole
def test_without_the_option_warmup_waits(gate: Gate) -> None:
    gate.opened.set()
    model = compiled_llm.wrap(plain(), **OPTIONS)
    model.compiled.warmup(1)
    assert model.compiled.runner_lifecycle.compiling is None
    assert not is_eager(model)


def test_without_warmup_nothing_is_compiled(gate: Gate, seed: int) -> None:
    gate.opened.set()
    model, inputs = eager_first(), mixed_prompts(LENGTHS, 128, seed)
    for _ in range(2):
        greedy(model, inputs, 3)
    assert is_eager(model)
    assert gate.times == 0


class Watching(TextStreamer):
    """Lets compiling end after the first token, and notes how each step has run."""

    leaves_model_alone = True

    def __init__(self, model: Any, gate: Gate) -> None:
        self.model, self.gate = model, gate
        self.eager: list[bool] = []

    def put(self, value: Any) -> None:
        if value.dim() == 1:  # else it is the prompt
            compile_to_the_end(self.model, self.gate)
            self.eager.append(is_eager(self.model))

    def end(self) -> None:
        pass


@pytest.mark.whole
def test_an_answer_ends_in_the_mode_that_it_began_in(gate: Gate, seed: int) -> None:
    model, inputs = eager_first(), mixed_prompts(LENGTHS[:1], 128, seed)
    model.compiled.warmup(1)
    for eager in (True, False):
        watching = Watching(model, gate)
        model.generate(**inputs, max_new_tokens=6, do_sample=False, streamer=watching)
        assert watching.eager == [eager] * 6


@pytest.mark.whole
@pytest.mark.either("drains")
@pytest.mark.parametrize("drains", [False, True])
def test_a_busy_engine_changes_over_once_its_requests_have_ended(
    gate: Gate, drains: bool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """After a while, new requests wait for it: else they could follow each other for ever."""
    monkeypatch.setattr(background_compilation, "_DRAIN_AFTER", 0.0 if drains else 1000.0)
    model, prompts = eager_first(), [[5, 6, 7], [8, 9]]
    params = [compiled_llm.SamplingParams(max_tokens=count, temperature=0.0) for count in (40, 4)]
    with compiled_llm.Engine(model) as engine:
        engine.warmup([1, 2])
        began, handles = [time.monotonic()], [engine.submit(prompts[0], params[0])]
        next(iter(handles[0]))
        with engine.paused(weights_stay=True):
            assert not handles[0].done
            compile_to_the_end(model, gate)
            began.append(time.monotonic())
            handles.append(engine.submit(prompts[1], params[1]))
        first, second = (handle.result() for handle in handles)
        assert second.first_token_seconds is not None
        assert (began[0] + first.seconds < began[1] + second.first_token_seconds) is drains
        assert is_eager(model) is not drains
        said = [first.token_ids, second.token_ids]
        third = engine.submit(prompts[1], params[1]).result()
        assert not is_eager(model)
    assert third.token_ids == said[1]
    for prompt, own, tokens_said in zip(prompts, params, said, strict=True):
        expected = greedy(plain(), {"input_ids": torch.tensor([prompt])}, own.max_tokens)
        assert expected[0, len(prompt) :].tolist() == tokens_said


@pytest.mark.whole
@pytest.mark.parametrize("drains", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_a_request_that_is_preempted_goes_on_in_the_mode_that_it_began_in(
    gate: Gate, drains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is admitted again when no row runs, which is when compiled programs take over otherwise."""
    monkeypatch.setattr(background_compilation, "_DRAIN_AFTER", 0.0 if drains else 1000.0)
    monkeypatch.setitem(POLICIES, "auto", Greedy)  # more begin than fit: requests are preempted
    model = compiled_llm.wrap(plain(), eager_first=True, **{**OPTIONS, "kv_memory": "96 tokens", "page_size": 4})
    prompts, params = [[5, 6, 7], [8, 9, 10]], compiled_llm.SamplingParams(max_tokens=60, temperature=0.0)
    with compiled_llm.Engine(model) as engine:
        engine.warmup([1, 2])
        handles = [engine.submit(prompt, params) for prompt in prompts]
        for handle in handles:
            next(iter(handle))
        with engine.paused(weights_stay=True):
            assert not any(handle.done for handle in handles)
            compile_to_the_end(model, gate)
            late = engine.submit(prompts[0], params) if drains else None
        said = [handle.result().token_ids for handle in handles]
        assert engine.stats().preemptions > 0
        assert late is not None or is_eager(model)
        late = late or engine.submit(prompts[0], params)
        assert late.result().token_ids == said[0]
        assert not is_eager(model)
    assert said == [expected_tokens(prompt, tokens=60) for prompt in prompts]


@pytest.mark.whole
def test_a_failure_is_said_once_and_answers_go_on(gate: Gate, caplog: pytest.LogCaptureFixture, seed: int) -> None:
    gate.error = ValueError("planted\nwith all that a compiler has said")
    model, inputs = eager_first(), mixed_prompts(LENGTHS, 128, seed)
    expected = greedy(plain(), inputs, 4)
    with caplog.at_level(logging.DEBUG, "compiled_llm.graphs"):
        model.compiled.warmup(1)
        compile_to_the_end(model, gate)
        for _ in range(2):
            torch.testing.assert_close(greedy(model, inputs, 4), expected)
            compilation_of(model).wait()  # it does not try again by itself
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert said.endswith("ValueError: planted")
    (all_of_it,) = [record for record in caplog.records if record.exc_info]
    assert all_of_it.levelname == "DEBUG"
    assert all_of_it.exc_info is not None
    assert str(gate.error) in str(all_of_it.exc_info[1])
    assert is_eager(model)
    assert gate.times == 1
    gate.error = None
    model.compiled.warmup(1)  # tries again
    compile_to_the_end(model, gate)
    torch.testing.assert_close(greedy(model, inputs, 4), expected)
    assert not is_eager(model)


def test_it_stops_in_the_midst_of_compiling(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    began = threading.Event()

    def compile_for_ever(*_: Any) -> None:
        began.set()
        while True:
            began.wait(0.01)

    monkeypatch.setattr(Inductor, "__call__", compile_for_ever)
    model = eager_first()
    model.compiled.warmup(1)
    assert began.wait(60)
    compilation_of(model).stop()
    assert not compilation_of(model).running
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def sleep_meanwhile(gate: Gate, seed: int) -> None:
    model, inputs = eager_first(), mixed_prompts(LENGTHS, 128, seed)
    with compiled_llm.Engine(model) as engine:
        engine.warmup([2])
        engine.sleep()
        compile_to_the_end(model, gate)
        engine.wake()
        torch.testing.assert_close(greedy(model, inputs, 4), greedy(plain(), inputs, 4))
        assert not is_eager(model)


def move_meanwhile(gate: Gate, seed: int) -> None:
    model, inputs = eager_first(), mixed_prompts(LENGTHS, 128, seed)
    model.compiled.warmup([2])
    assert gate.reached.wait(60)
    model.to(torch.float64)
    compile_to_the_end(model, gate)
    expected = greedy(plain().to(torch.float64), inputs, 4)
    torch.testing.assert_close(greedy(model, inputs, 4), expected)  # which begins to compile once more
    assert is_eager(model)
    compilation_of(model).wait()
    torch.testing.assert_close(greedy(model, inputs, 4), expected)
    assert not is_eager(model)
    assert model.compiled.stats().recompiles == 0


@pytest.mark.whole
@pytest.mark.either("change")
@pytest.mark.parametrize("change", [sleep_meanwhile, move_meanwhile])
def test_a_model_that_has_slept_or_moved_meanwhile_gets_what_fits_it(
    change: Callable[[Gate, int], None], gate: Gate, seed: int
) -> None:
    change(gate, seed)


@pytest.mark.whole
def test_an_engine_that_does_not_watch_its_model_changes_over_without_a_look(gate: Gate) -> None:
    """So the compiled programs have to forget the pages of the thread that has compiled them."""
    model = eager_first()
    with compiled_llm.Engine(model, watch_model=False) as engine:
        engine.warmup([1])
        assert engine.submit([5, 6, 7], SETTINGS).result().token_ids == expected_tokens([5, 6, 7])
        assert is_eager(model)
        compile_to_the_end(model, gate)
        assert engine.submit([8, 9, 10], SETTINGS).result().token_ids == expected_tokens([8, 9, 10])
        assert not is_eager(model)


@pytest.mark.whole
@pytest.mark.parametrize("watches", [True, False])
@pytest.mark.parametrize("compiled", [False, True], ids=["while it compiles", "before they take over"])
def test_new_weights_are_those_of_all_later_answers_and_nothing_is_compiled_for_them(
    gate: Gate, compiled: bool, watches: bool, tmp_path: Path
) -> None:
    plain(1).save_pretrained(tmp_path)
    model, prompt = eager_first(), [5, 6, 7]
    with compiled_llm.Engine(model, watch_model=watches) as engine:
        engine.warmup([1])
        assert gate.reached.wait(60)
        running = engine.submit(prompt, SETTINGS)
        if compiled:
            next(iter(running))
            compile_to_the_end(model, gate)
        engine.update_weights(tmp_path)
        assert running.result().token_ids == expected_tokens(prompt)  # it has ended before
        if not compiled:
            assert engine.submit(prompt, SETTINGS).result().token_ids == expected_tokens(prompt, 1)
            assert is_eager(model)
            compile_to_the_end(model, gate)
        for _ in range(2):
            assert engine.submit(prompt, SETTINGS).result().token_ids == expected_tokens(prompt, 1)
            assert not is_eager(model)
    assert gate.times == 2
    assert model.compiled.stats().recompiles == 0
