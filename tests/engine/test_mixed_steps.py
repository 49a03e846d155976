"""Mixed steps: prompts and running requests in one launch give what two launches give."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedModel

from compiled_llm.compilation.graphs.captured_shapes import CapturedShapes
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.step_table import StepEntry
from compiled_llm.config import Mode
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.loop_settings import Mixed
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.prefill.mixed_steps import MixedStep
from compiled_llm.execution.steps.steps import Steps
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.random_requests import (
    CAPTURES,
    MODES,
    WORDS,
    answers,
    assert_same,
    cases_read_early_and_late,
    requests,
)
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import PATIENCE, greedy, wrapped
from support.execution.page_checks import check_pages
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.parity import assert_account_is_empty
from support.tiny_models import WINDOWS, tiny_qwen3

pytestmark = pytest.mark.usefixtures("one_thread")


def engine_of(mixed: Mixed, tokens: int = 4000, config: dict[str, Any] | None = None, **options: Any) -> Engine:
    return engine_for(tiny_qwen3(**WORDS, **config or {}), mixed, tokens, **options)


def engine_for(
    plain: PreTrainedModel, mixed: Mixed, tokens: int = 4000, mode: Mode = "eager", **options: Any
) -> Engine:
    sizes = {"max_batch_size": 8, "page_size": 16, "prefill_tokens": 32}
    model = check_pages(wrapped(tokens, plain, mode=mode, **sizes))  # with random requests, they stay silent
    return Engine(model, tokenizer=byte_level(), max_num_seqs=8, mixed=mixed, **options)


@pytest.fixture
def ways(seed: int, whole: bool, request: pytest.FixtureRequest) -> Sequence[Mixed]:
    """Steps that are always mixed, and some: one of both by seed and case, unless all are asked for."""
    both: Sequence[Mixed] = (True, "auto")
    return both if whole else (random.Random(f"{seed} {request.node.name}").choice(both),)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    ("case", "late"), cases_read_early_and_late("many pages", "few pages", "short steps", "windows")
)
def test_tokens_and_log_probabilities_are_those_of_two_launches(
    case: str, late: bool, ways: Sequence[Mixed], seed: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: late))
    options: dict[str, Any] = {"config": WINDOWS} if case == "windows" else {}
    if case == "few pages":
        monkeypatch.setitem(POLICIES, "auto", Greedy)
        options["tokens"] = 200
    if case == "short steps":
        options["max_step_ms"] = 0.01
    assert_mixed_steps_change_nothing(
        lambda mixed: engine_of(mixed, **options),
        seed,
        monkeypatch,
        count=40 if whole else 12,
        preempts=case == "few pages",
        ways=ways,
    )


def assert_mixed_steps_change_nothing(
    engine: Callable[[Mixed], Engine],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    count: int = 12,
    preempts: bool = False,
    ways: Sequence[Mixed] = (True, "auto"),
) -> None:
    pays = random.Random(seed)
    monkeypatch.setattr(ModelRunner, "mixing_pays", lambda *_: pays.random() < 0.5)  # never, with models this small
    asked, outputs = requests(seed, count), list[list[RequestOutput]]()
    for mixed in (False, *ways):
        with engine(mixed) as running:
            outputs.append(answers(running, asked, seed))
            stats, model = running.stats(), running._model
            assert (stats.mixed_steps > 0) == (mixed is not False)
            assert stats.mixed_steps < stats.steps
            assert not preempts or stats.preemptions > 0
        assert_account_is_empty(model)
    for expected, *others in zip(*outputs, strict=True):
        for output in others:
            assert_same(output, expected)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.either("mode")
@pytest.mark.parametrize("mode", MODES)
def test_mixed_steps_run_in_each_mode(
    mode: Mode, ways: Sequence[Mixed], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    CAPTURES.get(mode, lambda _: None)(monkeypatch)
    assert_mixed_steps_change_nothing(
        lambda mixed: engine_for(tiny_qwen3(**WORDS, num_hidden_layers=1), mixed, mode=mode if mixed else "eager"),
        seed,
        monkeypatch,
        ways=ways,
    )


@pytest.mark.whole
def test_captured_shapes_are_replayed_by_mixed_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    let_a_cpu_capture(monkeypatch)
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: False))
    asked, outputs, replays = requests(seed, 16), [], []
    for mixed in (False, True):
        with engine_of(mixed) as engine:
            outputs.append(answers(engine, asked, seed))
            table = engine._model.compiled.stats().cuda_graph_table
            replays.append(sum(int(str(row["replays"])) for row in table if row["phase"] == "decode"))
    assert replays[1] < replays[0], "rows that run went along with prompts"
    for output, expected in zip(*outputs, strict=True):
        assert_same(output, expected)


def test_a_prompt_and_what_runs_are_one_launch_if_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: False))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with engine_of(True) as engine:
        first = engine.submit([5, 6, 7], params)
        next(iter(first))
        second = engine.submit(list(range(3, 83)), params)  # chunks of 31, 31 and 18 beside one that runs
        answered = [handle.result(PATIENCE).token_ids for handle in (first, second)]
        assert engine.stats().mixed_steps == 3
    with engine_of(False) as engine:
        assert answered == [engine.generate([ids], params)[0].token_ids for ids in ([5, 6, 7], list(range(3, 83)))]


@pytest.mark.whole
def test_a_launch_that_finds_the_model_changed_runs_again_with_what_it_was_fed(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other replay does. Rows with penalties are among them: they are checked before."""
    let_a_cpu_capture(monkeypatch)
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: False))
    asked, outputs, found = requests(seed, 16), [], list[StepKey]()
    may_replay = Steps.may_replay

    def sometimes(self: Steps, entry: StepEntry[Any]) -> bool:
        found.append(entry.key)
        return may_replay(self, entry) and not (entry.key.phase == "prefill" and len(found) % 2)

    for mixed in (False, True):
        with engine_of(mixed) as engine:
            outputs.append(answers(engine, asked, seed))
        monkeypatch.setattr(Steps, "may_replay", sometimes)
    assert any(key.phase == "prefill" for key in found[::2])
    for output, expected in zip(*outputs, strict=True):
        assert_same(output, expected)


MEASURED = [
    # bytes of the matrices and of a token in pages; running rows, their tokens, new tokens; does one launch pay?
    *[(13.9e9, 147456, rows, 256, new, True) for rows in (1, 4, 8, 16, 32, 64, 120) for new in (64, 256)],
    *[(13.9e9, 147456, rows, 256, 1024, False) for rows in (1, 4, 8, 16, 32, 64, 120)],
    *[(13.9e9, 147456, rows, 2048, 64, True) for rows in (1, 4, 8, 16, 32)],
    *[(13.9e9, 147456, rows, 2048, 256, True) for rows in (1, 4)],
    (13.9e9, 147456, 64, 2048, 256, False),
    *[(13.9e9, 147456, rows, 2048, 1024, False) for rows in (8, 16, 32, 64)],
    *[(0.88e9, 114688, rows, 256, new, False) for rows in (1, 8, 64) for new in (64, 256, 1024)],
]


@pytest.mark.parametrize(("weights", "token", "rows", "length", "new", "pays"), MEASURED)
def test_the_rule_says_what_was_measured(
    weights: float, token: int, rows: int, length: int, new: int, pays: bool
) -> None:
    shapes = CapturedShapes(128, int(weights / 72), 40960, 8192)

    def computed(tokens: int, rows: int) -> int:
        shape = shapes.smallest(tokens, rows)
        return tokens if shape is None else shape.tokens

    step = MixedStep(int(weights), computed(new, 1), computed(new + rows, 1 + rows), rows * length * token)
    assert step.pays == pays


def test_by_itself_an_engine_mixes_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: False))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for pays in (False, True):
        monkeypatch.setattr(ModelRunner, "mixing_pays", lambda *_, pays=pays: pays)
        with engine_of("auto") as engine:
            first = engine.submit([5, 6, 7], params)
            next(iter(first))
            engine.submit([8, 9], params).result(PATIENCE)
            first.result(PATIENCE)
            assert bool(engine.stats().mixed_steps) == pays


@pytest.mark.parametrize("mixed", ["on", None, 1, 2, "Auto"])
def test_what_mixed_may_be(mixed: Any) -> None:
    with pytest.raises(ValueError, match=r"mixed=.*: give True, False or \"auto\""):
        engine_of(mixed)


def test_mixed_steps_that_could_never_be_are_refused() -> None:
    model = wrapped(prefill_tokens=1)
    with pytest.raises(ValueError, match=r"mixed=True with prefill_tokens=1: .* wrap with prefill_tokens=2 or more"):
        Engine(model, mixed=True)
    with pytest.raises(ValueError, match=r"mixed=True with max_num_seqs=1: .* give max_num_seqs=2 or more"):
        Engine(wrapped(), max_num_seqs=1, mixed=True)
    for mixed in (False, "auto"):
        Engine(model, max_num_seqs=1, mixed=mixed).close()


def test_two_tokens_are_enough_for_mixed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a request that runs, and one of a prompt."""
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: False))
    with Engine(wrapped(prefill_tokens=2), max_num_seqs=2, mixed=True) as engine:
        first = engine.submit([5, 6, 7], greedy(20))
        next(iter(first))
        engine.submit([8, 9, 10, 11], greedy(2)).result(PATIENCE)
        assert engine.stats().mixed_steps == 4
        first.result(PATIENCE)
