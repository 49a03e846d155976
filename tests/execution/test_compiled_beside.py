"""Programs of steps that draft are compiled in a thread, and rows run in plain steps until they are there."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.compilation.program_list import DECODE_MANY, DECODE_ONE, PREFILL
from compiled_llm.config import WrapConfig
from compiled_llm.engine.engine import Engine
from compiled_llm.execution.drafts.costs import Costs
from compiled_llm.execution.drafts.rule import Rule
from compiled_llm.execution.steps.compiled_beside import CompiledBeside
from compiled_llm.kvcache.pool import PagePool
from compiled_llm.kvcache.row import Row
from compiled_llm.requests.sampling_params import SamplingParams
from support.compilation.compile_gate import Gate
from support.compilation.left_uncompiled import leave_uncompiled
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.noting import note_calls
from support.parity import assert_account_is_empty, greedy
from support.tiny_models import tiny_qwen3

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread", "without_inductor")]

OPTIONS: dict[str, Any] = {"max_batch_size": 4, "kv_memory": "2000 tokens", "progress": False, "mode": "compile"}
PROMPT = [5, 6, 7] * 5
NEW = 40
NGRAMS = {"method": "ngram", "num_speculative_tokens": 7}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A CPU that compiles beside, as CUDA does."""
    monkeypatch.setattr(WrapConfig, "compiles_drafts_beside_on", lambda config, device: config.mode != "eager")
    gate = Gate(monkeypatch, "compiled_llm compilation")
    yield gate
    gate.opened.set()


def plain() -> Any:
    return tiny_qwen3(0, eos_token_id=None, num_hidden_layers=2)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.whole)], ids=["compiled", "captured"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without --whole, steps that do not draft run as Python, except those of one test with one row."""
    if request.param:
        let_a_cpu_capture(monkeypatch)
    if not request.config.getoption("whole") and request.node.callspec.params.get("rows") != 1:
        leave_uncompiled(monkeypatch, PREFILL, DECODE_ONE, DECODE_MANY)
    model = compiled_llm.wrap(plain(), **OPTIONS)
    model.compiled.warmup(1)
    return model


def inputs_of(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[10 + row, *PROMPT] for row in range(rows)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def beside(model: Any) -> CompiledBeside:
    found = model.compiled.model_runner().graph_manager.beside
    assert isinstance(found, CompiledBeside)
    return found


def steps_used(model: Any) -> dict[int, int]:
    """Return how many decode steps of each number of tokens a row have run so far."""
    used: dict[int, int] = {}
    for key, count in model.compiled.events.used.items():
        if not isinstance(key, str) and key.phase == "decode":
            used[key.new_tokens_per_row] = used.get(key.new_tokens_per_row, 0) + count
    return used


def guessing(model: Any, rows: int) -> tuple[torch.Tensor, dict[int, int]]:
    """Return what rows that draft answer, and the steps that it took."""
    before = steps_used(model)
    answers = greedy(model, inputs_of(rows), NEW, prompt_lookup_num_tokens=7)
    return answers, {new: count - before.get(new, 0) for new, count in steps_used(model).items()}


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_run_in_plain_steps_until_programs_are_there_and_then_repeat_their_steps(
    rows: int, gate: Gate, model: Any
) -> None:
    model.compiled.warmup(rows)
    expected = greedy(plain(), inputs_of(rows), NEW)
    for _ in range(2):
        answers, steps = guessing(model, rows)
        torch.testing.assert_close(answers, expected)
        assert {*steps} == {1}
        assert gate.reached.wait(60)
    gate.opened.set()
    beside(model).wait()
    seen = []
    for _ in range(3):
        answers, steps = guessing(model, rows)
        torch.testing.assert_close(answers, expected)
        seen.append(steps)
    assert seen[0][8] > 0
    assert seen[0] == seen[1] == seen[2]
    assert gate.times == 1
    assert model.compiled.events.cold_starts == [], "no call has waited"
    assert model.compiled.stats().recompiles == 0
    assert_account_is_empty(model)


@pytest.mark.whole
def test_a_call_begins_to_draft_in_its_midst(gate: Gate, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program comes while it runs: at its next trial it is there, and takes the next steps."""
    expected = greedy(plain(), inputs_of(1), NEW)
    asked = note_calls(monkeypatch, Rule, "size", lambda rule, rows: let_it_come(gate, model, len(asked)))
    answers, steps = guessing(model, 1)
    torch.testing.assert_close(answers, expected)
    assert steps[8] > 0
    assert steps[1] >= 16
    assert model.compiled.events.cold_starts == []


def let_it_come(gate: Gate, model: Any, asked: int) -> None:
    if asked == 3:
        gate.opened.set()
        beside(model).wait()


def test_an_engine_guesses_once_programs_are_there(gate: Gate, model: Any) -> None:
    params, prompts = SamplingParams(max_tokens=NEW, temperature=0.0), [[10, *PROMPT]]
    with Engine(model, max_num_seqs=1) as engine:
        expected = engine.generate(prompts, params)[0].token_ids
    with Engine(model, max_num_seqs=1, speculative_config=NGRAMS) as engine:
        assert engine.generate(prompts, params)[0].token_ids == expected
        drafts = engine.stats().drafts
        assert drafts is not None
        assert drafts.drafts == 0
        gate.opened.set()
        beside(model).wait()
        assert engine.generate(prompts, params)[0].token_ids == expected
        drafts = engine.stats().drafts
        assert drafts is not None
        assert drafts.accepted_tokens > 0
        assert engine.stats().cold_starts == 0
    assert_account_is_empty(model)


def test_a_failure_is_said_once_and_rows_go_on_in_plain_steps(
    gate: Gate, model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    gate.error = ValueError("planted\nwith all that a compiler has said")
    gate.opened.set()
    expected = greedy(plain(), inputs_of(1), NEW)
    with caplog.at_level(logging.DEBUG, "compiled_llm.graphs"):
        for _ in range(3):
            answers, steps = guessing(model, 1)
            torch.testing.assert_close(answers, expected)
            assert {*steps} == {1}
            beside(model).wait()
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert said.endswith("steps go on without it: ValueError: planted")
    assert gate.times == 1


@pytest.mark.whole
def test_sleep_waits_for_what_is_being_compiled_and_the_next_call_has_it_compiled_again(gate: Gate, model: Any) -> None:
    expected = greedy(plain(), inputs_of(1), NEW)
    with Engine(model) as engine:
        guessing(model, 1)
        assert gate.reached.wait(60)
        threading.Timer(0.2, gate.opened.set).start()
        own = beside(model)
        engine.sleep(graphs=True)
        engine.wake()
        assert not own.running
        answers, steps = guessing(model, 1)
        beside(model).wait()
        answers, steps = guessing(model, 1)
    torch.testing.assert_close(answers, expected)
    assert steps[8] > 0


@pytest.mark.whole
def test_a_model_that_has_changed_meanwhile_is_compiled_again(gate: Gate, model: Any) -> None:
    """What was traced of the one before does not run."""
    guessing(model, 1)
    assert gate.reached.wait(60)
    other = plain().to(torch.float64)
    gate.opened.set()
    model.to(torch.float64)
    expected = greedy(other, inputs_of(1), NEW)
    steps = dict[int, int]()
    for _ in range(4):
        answers, steps = guessing(model, 1)
        torch.testing.assert_close(answers, expected)
        beside(model).wait()
    assert steps[8] > 0


@pytest.mark.whole
def test_the_end_of_the_process_interrupts_it(model: Any, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    guessing(model, 1)
    assert gate.reached.wait(60)
    thread = beside(model)._thread
    assert thread is not None
    threading.Timer(0.2, gate.opened.set).start()
    thread.interrupt()
    assert not thread.running
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_random_numbers_go_on_for_others(gate: Gate, model: Any) -> None:
    """What is drawn while something is compiled is not drawn once more."""
    setters = random.setstate, torch.random.set_rng_state
    guessing(model, 1)
    assert gate.reached.wait(60)
    drawn = []
    for waits in (False, True):
        torch.manual_seed(5)
        random.seed(5)
        first = torch.rand(()).item(), random.random()
        if waits:
            gate.opened.set()
            beside(model).wait()
        drawn.append([first, (torch.rand(()).item(), random.random())])
    assert drawn[0] == drawn[1]
    assert setters == (random.setstate, torch.random.set_rng_state)


def test_a_rule_asks_again_while_there_is_nothing_to_try() -> None:
    """A pause in which nothing could be tried makes no later one longer."""
    there: list[int] = [1]
    asked = list[int]()

    def sizes(rows: int) -> Sequence[int]:
        asked.append(rows)
        return there

    rule, rows = Rule(sizes, Costs(16 << 30, on_cuda=True)), [Row(PagePool(20, 4), 8)]
    assert {rule.size(rows) for _ in range(200)} == {1}
    assert 10 <= len(asked) <= 14
    there = [1, 8]
    assert 8 in [rule.size(rows) for _ in range(17)]
