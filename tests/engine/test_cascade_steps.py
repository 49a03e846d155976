"""Steps that read shared pages once give an engine's requests what steps give that read them for each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.compilation.graphs.captured_shapes import buckets_up_to
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.inputs import DecodeInputs
from compiled_llm.config import Mode, WrapConfig
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.loop_settings import Mixed
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.execution.cascade import cascade as cascades
from compiled_llm.execution.cascade.cascade import Cascade
from compiled_llm.execution.cascade.tables import CascadeBatch
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.steps.decode_buffers import DecodeBuffers
from compiled_llm.execution.steps.launch import Launch
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm_ops.attention.cascade import rule
from compiled_llm_ops.reference.backend import Reference
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
from support.execution.stand_in_cuda_graphs import let_captures_be_late
from support.parity import assert_account_is_empty
from support.tiny_models import WINDOWS, tiny_qwen3

pytestmark = pytest.mark.usefixtures("one_thread", "short_runs")


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests here share 32 tokens at most."""
    monkeypatch.setattr(cascades, "LEAST_KEYS", 8)


@pytest.fixture
def automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``"auto"`` choose on a CPU, where some of the runs pay and others do not."""
    monkeypatch.setattr(rule, "LAUNCHES", 0.0)
    monkeypatch.setattr(rule, "MERGED_HEAD", 0.0)
    monkeypatch.setattr(rule, "TILE_READ", 2.5 * rule.ROW_READ)
    chosen = Cascade.of

    def as_on_a_gpu(state: RunnerState, ops: Any) -> Cascade | None:
        on_a_gpu = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
        return chosen(SimpleNamespace(**{**vars(state), **on_a_gpu}), ops)

    monkeypatch.setattr(Cascade, "of", as_on_a_gpu)


def engine_for(
    plain: PreTrainedModel,
    cascade: bool | Literal["auto"],
    tokens: int = 4000,
    mode: Mode = "eager",
    page_size: int = 4,
    mixed: Mixed = False,
    rows: int = 8,
    **others: Any,
) -> Engine:
    options: dict[str, Any] = {"mode": mode, "page_size": page_size, "max_batch_size": rows, "prefill_tokens": 32}
    model = check_pages(wrapped(tokens, plain, cascade=cascade, **options, **others))  # they stay silent
    return Engine(model, tokenizer=byte_level(), max_num_seqs=rows, mixed=mixed)


def assert_cascade_changes_nothing(
    engine: Callable[[Any], Engine],
    seed: int,
    count: int = 8,
    preempts: bool = False,
    on: bool | Literal["auto"] = True,
) -> None:
    asked, outputs = requests(seed, count), list[list[RequestOutput]]()
    if preempts:  # some that run at once, and whose answers have more tokens than 140 of pages
        asked += [([*range(3, 35), last], greedy(30)) for last in range(40, 46)]
    for cascade in (False, on):
        with engine(cascade) as running:
            outputs.append(answers(running, asked, seed))
            stats, model = running.stats(), running._model
            assert (model.compiled.stats().cascade_steps > 0) == (cascade is not False)
            assert model.compiled.stats().cascade_steps < stats.steps
            assert model.compiled.stats().recompiles == 0
            assert not preempts or stats.preemptions > 0
        assert_account_is_empty(model)
    for expected, output in zip(*outputs, strict=True):
        assert_same(output, expected)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    ("case", "late"), cases_read_early_and_late("many pages", "few pages", "mixed steps", "windows")
)
def test_tokens_and_log_probabilities_are_those_of_rows_that_read_for_themselves(
    case: str, late: bool, seed: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: late))
    config = WINDOWS if case == "windows" else {}
    options: dict[str, Any] = {"mixed": case == "mixed steps"}
    if case == "few pages":
        monkeypatch.setitem(POLICIES, "auto", Greedy)
        options["tokens"] = 140
    assert_cascade_changes_nothing(
        lambda cascade: engine_for(tiny_qwen3(**WORDS, **config), cascade, **options),
        seed,
        count=40 if whole else 8,
        preempts=case == "few pages",
    )


@pytest.mark.usefixtures("automatic")
def test_shared_pages_are_read_once_where_it_pays(seed: int, whole: bool) -> None:
    count = 40 if whole else 8
    assert_cascade_changes_nothing(
        lambda cascade: engine_for(tiny_qwen3(**WORDS), cascade), seed, count=count, on="auto"
    )


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.either("mode")
@pytest.mark.parametrize("mode", MODES)
def test_shared_pages_are_read_once_in_each_mode(mode: Mode, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    CAPTURES.get(mode, lambda _: None)(monkeypatch)
    plain = {**WORDS, "num_hidden_layers": 1}
    assert_cascade_changes_nothing(
        lambda cascade: engine_for(tiny_qwen3(**plain), cascade, mode=mode if cascade else "eager"), seed
    )


def test_rows_that_share_nothing_run_as_without_it() -> None:
    with engine_for(tiny_qwen3(**WORDS), cascade=True) as engine:
        handles = [engine.submit([first, *range(5, 60)], greedy(8)) for first in (3, 4, 5)]
        for handle in handles:
            handle.result(PATIENCE)
        assert engine._model.compiled.stats().cascade_steps == 0
        assert "read shared pages once" not in str(engine._model.compiled.stats())


def test_steps_that_read_shared_pages_once_are_counted() -> None:
    prompt = [*range(3, 60)]
    with engine_for(tiny_qwen3(**WORDS), cascade=True) as engine:
        engine.generate([prompt], greedy(1))
        handles = [engine.submit([*prompt, last], greedy(40)) for last in (3, 4)]
        for handle in handles:
            handle.result(PATIENCE)
        stats = engine._model.compiled.stats()
        assert 0 < stats.cascade_steps < 40
        assert f"{stats.cascade_steps} of them read shared pages once" in str(stats)


class Way(NamedTuple):
    """The way in which a decode step runs that is to read shared pages once."""

    captured: bool
    cascade: bool


def ways_of_a_load(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[Way]:
    """Let 64 requests that begin alike run at once, and count how the steps of several rows that share pages run."""
    found, call = Counter[Way](), Launch.__call__

    def noting(self: Launch) -> StepOutputs:
        if self.wanted.shares:
            found[Way(self.replays, self.key.shares)] += 1
        return call(self)

    with monkeypatch.context() as patch:
        patch.setattr(Launch, "__call__", noting)
        engine.generate([[*range(3, 60), 60 + own] for own in range(64)], greedy(40))
    return found


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU capture as CUDA does, 60 slices long, while the device takes longer over a step than the host."""
    let_captures_be_late(monkeypatch, slices=60)
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: True))
    monkeypatch.setattr(rule, "TILE_READ", 0.0)


def engine_of_64(**options: Any) -> Engine:
    return engine_for(tiny_qwen3(**{**WORDS, "num_hidden_layers": 1}), "auto", tokens=8000, rows=64, **options)


def shared_buckets(engine: Engine) -> list[int]:
    table = engine._model.compiled.stats().cuda_graph_table
    return [row["rows"] for row in table if (row["phase"], row["variant"], row["state"]) == ("decode", 1, "ready")]


@pytest.mark.whole
@pytest.mark.usefixtures("automatic", "captures")
def test_the_first_load_after_warmup_replays_steps_that_read_shared_pages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of_64() as engine:
        engine.warmup()
        assert shared_buckets(engine) == buckets_up_to(64)[1:]
        engine.generate([[*range(3, 60)]], greedy(1))
        first, second = (ways_of_a_load(engine, monkeypatch) for _ in range(2))
        assert {*first} == {Way(captured=True, cascade=True)}
        assert first == second
        assert shared_buckets(engine) == buckets_up_to(64)[1:], "no other step was captured"
        assert engine.stats().cold_starts == engine._model.compiled.stats().recompiles == 0


@pytest.mark.whole
@pytest.mark.usefixtures("automatic", "captures")
@pytest.mark.parametrize("others", [False, True], ids=["nothing captured", "steps of rows that share nothing captured"])
def test_the_first_load_without_warmup_waits_for_captures_a_few_steps_long(
    others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of_64() as engine:
        engine.generate([[*range(3, 60)]], greedy(1))
        if others:
            engine.generate([[token, *range(3, 60)] for token in range(64)], greedy(40))
        first, second = (ways_of_a_load(engine, monkeypatch) for _ in range(2))
        assert first.total() > 30
        assert first[Way(captured=True, cascade=True)] > 0.75 * first.total()
        assert first[Way(captured=True, cascade=False)] + first[Way(captured=False, cascade=False)] <= 2 * others
        assert {*second} == {Way(captured=True, cascade=True)}


@pytest.mark.usefixtures("automatic", "captures")
def test_a_step_of_few_rows_is_captured_after_one_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding runs first, and reads no tables of rows, which name more rows than the step has."""
    longest: list[int] = []
    made = DecodeBuffers.of_padding

    def noted(own: DecodeBuffers, step: StepKey) -> DecodeInputs:
        inputs = made(own, step)
        if isinstance(inputs.shared, CascadeBatch):
            longest.append(int(inputs.shared.shared_lengths.max()))
        return inputs

    monkeypatch.setattr(DecodeBuffers, "of_padding", noted)
    with engine_of_64() as engine:
        engine.warmup([64])
        for rows in (64, 5):
            engine.generate([[*range(3, 60), 60 + own] for own in range(rows)], greedy(30))
        table = engine._model.compiled.cuda_graphs
    assert longest, "smaller steps were captured while the one of 64 rows ran"
    assert set(longest) == {0}
    assert table.failures == 0


@pytest.mark.usefixtures("automatic", "captures")
def test_who_wakes_up_has_the_steps_that_read_shared_pages_once() -> None:
    with engine_of_64() as engine:
        engine.warmup([4, 64])
        engine.sleep(graphs=True)
        assert shared_buckets(engine) == []
        engine.wake()
        assert shared_buckets(engine) == [4, 64]


@pytest.mark.usefixtures("automatic", "captures")
def test_warmup_evicts_no_step_for_those_that_read_shared_pages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WrapConfig, "graph_budget", property(lambda _: (None, 12)))
    with engine_of_64() as engine:
        engine.warmup([1, 2, 4, 8, 64])
        table = engine._model.compiled.stats().cuda_graph_table
        assert sum(row["evictions"] for row in table) == 0
        assert sum(row["captures"] for row in table) == 12
        assert shared_buckets(engine) == [8, 64], "the largest, in which others can run, come first"


@pytest.mark.usefixtures("automatic")
def test_a_backend_that_plans_decode_reads_shared_pages_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reference, "decode_ops", lambda self, device: None)
    monkeypatch.setattr(rule, "TILE_READ", 0.0)
    prompt = [*range(3, 60)]
    with engine_for(tiny_qwen3(**WORDS), cascade="auto") as engine:
        engine.generate([[*prompt, last] for last in (3, 4)], greedy(9))
        assert engine._model.compiled.stats().cascade_steps == 0
