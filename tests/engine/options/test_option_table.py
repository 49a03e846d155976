"""Each option of steps and pages with each other one, over each kind of layers: it works, or is refused by name."""

from __future__ import annotations

import functools
from typing import Any

import pytest

import compiled_llm
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm.execution.cascade import cascade as cascades
from compiled_llm.execution.state import score_room
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.option_table import (
    CELLS,
    LAYERS,
    OPTIONS,
    PAGE,
    USUAL,
    Cell,
    lines_of_support,
    table,
    written,
)
from support.engine.random_requests import BY_WEIGHTS, CHOOSING, WEIGHTS, assert_same, requests
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import PATIENCE, greedy, wrapped
from support.execution.page_checks import check_pages, wrong_tags
from support.indexed_models import needs_blocks
from support.noting import note_calls
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.usefixtures("one_thread", "short_runs", "without_inductor")

TOKENS = 140
"""In pages."""
MODELS = {**LAYERS, **WEIGHTS}


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests here share 32 tokens at most, and are admitted while others still grow; their pool is small."""
    monkeypatch.setattr(cascades, "LEAST_KEYS", 8)
    monkeypatch.setitem(POLICIES, "auto", Greedy)
    monkeypatch.setattr(score_room, "SHARE", 0.1)


def crowd() -> list[tuple[list[int], SamplingParams]]:
    """Requests that begin alike, whose answers have more tokens than there are pages for: some lose theirs.

    The last one's prompt is in chunks, beside those whose turn came before.
    """
    alike = [([*range(3, 35), last], greedy(20, logprobs=2)) for last in range(40, 46)]
    return [*alike, ([*range(34, 2, -1)] * 2 + [46], greedy(4, logprobs=2))]


def cases(refused: bool) -> list[Any]:
    return [
        pytest.param(
            cell,
            id=str(cell),
            marks=[pytest.mark.whole] * (cell not in USUAL) + [needs_blocks] * (cell.kind in CHOOSING),
        )
        for cell in CELLS
        if bool(cell.refusals) == refused
    ]


def engine_of(kind: str, *names: str, plain: Any = None) -> Engine:
    options = {key: value for name in names for key, value in OPTIONS[name].items()}
    mixed = options.pop("mixed", False)
    sizes = {"page_size": 4, "max_batch_size": 8, "prefill_tokens": 32, "cascade": False, **options}
    model = check_pages(wrapped(TOKENS, MODELS[kind]() if plain is None else plain, **sizes))
    return Engine(model, tokenizer=byte_level(), max_num_seqs=8, mixed=mixed)


def answers_with(kind: str, seed: int, *names: str) -> list[RequestOutput]:
    """The answers of an engine with these options, each of which has done something."""
    with engine_of(kind, *names) as engine:
        prompts, params = zip(*crowd(), *requests(seed, 4), strict=True)
        outputs = engine.generate(prompts, params)
        stats, model = engine.stats(), engine._model
        state, steps = model.compiled.model_runner().state, model.compiled.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert (model.compiled.config.attention_backend == "invariant") == ("batch_invariant" in names)
    assert any(pages.dtype.itemsize == 1 for pages in state.pages) == ("kv_dtype" in names)
    assert (steps.cascade_steps > 0) == ("cascade" in names)
    assert (stats.mixed_steps > 0) == ("mixed" in names)
    assert steps.recompiles == wrong_tags(model) == 0
    assert_account_is_empty(model)
    return outputs


answers_before = functools.cache(answers_with)
"""Those of the first option alone, which several cells have."""


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("cell", cases(refused=False))
def test_two_options_give_the_answers_of_the_first(cell: Cell, seed: int) -> None:
    expected = answers_before(cell.kind, seed, cell.first)
    # A sum in another order may be stored as the next number of fp8, or another block be chosen.
    within = 0.05 if "kv_dtype" in (cell.first, cell.second) else 1e-3
    for output, before in zip(answers_with(cell.kind, seed, cell.first, cell.second), expected, strict=True):
        assert_same(output, before, within)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    ("kind", "option"),
    [
        pytest.param(kind, "cascade" if kind == "chosen blocks" else "mixed", marks=[needs_blocks] * (kind in CHOOSING))
        for kind in LAYERS
    ],
)
def test_rows_read_their_own_pages(kind: str, option: str, seed: int) -> None:
    assert answers_before(kind, seed, option)  # each step has checked its pages


@pytest.mark.whole
@pytest.mark.parametrize("weights", BY_WEIGHTS)
@pytest.mark.parametrize("first", [(), ("kv_dtype",)], ids=["", "fp8"])
def test_adapted_and_quantised_weights_multiply_in_steps_of_all_kinds(
    weights: str, first: tuple[str, ...], seed: int
) -> None:
    expected = answers_with(weights, seed, *first)
    for output, before in zip(answers_with(weights, seed, *first, "cascade", "mixed"), expected, strict=True):
        assert_same(output, before, 0.05 if first else 1e-3)


@pytest.mark.parametrize("cell", cases(refused=True))
def test_what_does_not_go_together_is_refused_before_pages_are_allocated(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LAYERS[cell.kind]()
    allocated = note_calls(monkeypatch, RunnerState, "__init__", lambda *_, **__: True)
    with pytest.raises(ValueError, match="|".join(cell.refusals)):
        engine_of(cell.kind, cell.first, cell.second, plain=plain)
    assert not allocated
    compiled_llm.unwrap(plain)  # if the engine refused
    with engine_of(cell.kind, *cell.alone, plain=plain) as engine:
        assert len(engine.submit([5, 6, 7], greedy(4)).result(PATIENCE).token_ids) == 4


def test_the_page_of_compatibility_has_the_tables() -> None:
    page = PAGE.read_text()
    assert table() in page
    assert "\n".join(lines_of_support()) in page
    assert page == written(page), "run tests/support/engine/option_table.py from tests/"


def test_each_pair_and_kind_may_be_drawn() -> None:
    assert {cell[:2] for cell in USUAL} == {cell[:2] for cell in CELLS}
    assert {cell.kind for cell in USUAL} == {cell.kind for cell in CELLS}
