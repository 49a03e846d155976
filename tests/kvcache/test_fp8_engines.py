"""Pages of fp8 under an engine's requests: with every other option they give what they give alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm import Engine, kv_scales
from compiled_llm.config import KVScales
from compiled_llm.engine.steps import scheduler
from compiled_llm.engine.steps.loop import Mixed
from compiled_llm.execution.cascade import cascade as cascades
from support.engine.invariant_answers import answers_of, check_answers, invariant, some_requests
from support.engine.random_requests import BY_WEIGHTS, KINDS, WEIGHTS, WORDS, answers, assert_same, requests
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import wrapped
from support.parity import assert_account_is_empty
from support.tiny_models import WINDOWS, tiny_qwen3

pytestmark = pytest.mark.usefixtures("one_thread", "short_runs")

ELSEWHERE = ("Gemma2", "Gemma3", "GptOss")
"""Kinds of layers that pages of fp8 have in `tests/engine/options`."""

BY_KIND = [
    pytest.param(kind, marks=[pytest.mark.whole] * (kind in ELSEWHERE))
    for kind in KINDS
    if kind not in ("values that are no keys", "latents")
]


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests here share 32 tokens at most."""
    monkeypatch.setattr(cascades, "LEAST_KEYS", 8)


def engine_for(
    plain: PreTrainedModel, scales: KVScales, tokens: int = 4000, mixed: Mixed = False, **options: Any
) -> Engine:
    sizes = {"page_size": 4, "max_batch_size": 8, "prefill_tokens": 32, **options}
    model = wrapped(tokens, plain, kv_dtype="fp8_e4m3", kv_scales=scales, **sizes)
    return Engine(model, tokenizer=byte_level(), max_num_seqs=8, mixed=mixed)


def assert_options_change_nothing(
    plain: Callable[[], PreTrainedModel], seed: int, count: int = 8, preempts: bool = False, **options: Any
) -> None:
    asked, scales, outputs = requests(seed, count), kv_scales(plain(), [[*range(3, 60)]]), []
    for given in ({"max_batch_size": 1}, options):
        with engine_for(plain(), scales, **given) as engine:
            outputs.append(answers(engine, asked, seed))
            stats, model = engine.stats(), engine._model
        assert not (preempts and given is options) or stats.preemptions > 0
        assert (model.compiled.stats().cascade_steps > 0) == given.get("cascade", False)
        assert model.compiled.stats().recompiles == 0
        assert_account_is_empty(model)
    for expected, output in zip(*outputs, strict=True):
        assert_same(output, expected)


BOTH = {"cascade": True, "mixed": True, "page_size": 16}


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        pytest.param({"cascade": True}, False, id="cascade"),
        pytest.param({"cascade": True}, True, id="cascade, windows", marks=pytest.mark.whole),
        pytest.param({"mixed": True}, False, id="mixed steps", marks=pytest.mark.whole),
        pytest.param({"mixed": True}, True, id="mixed steps, windows"),
        pytest.param(BOTH, False, id="both, pages of 16", marks=pytest.mark.whole),
        pytest.param(BOTH, True, id="both, pages of 16, windows"),
    ],
)
def test_steps_of_any_kind(options: dict[str, Any], windows: bool, seed: int) -> None:
    """Each two of them with all kinds of layers: `tests/engine/options`."""
    config = WINDOWS if windows else {}
    assert_options_change_nothing(lambda: tiny_qwen3(**WORDS, **config), seed, **options)


def test_rows_that_are_preempted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_FIRST_GUESS", 1)
    assert_options_change_nothing(lambda: tiny_qwen3(**WORDS), seed, count=16, preempts=True, tokens=140, cascade=True)


@pytest.mark.parametrize("kind", BY_KIND)
def test_layers_of_each_kind(kind: str, seed: int) -> None:
    assert_options_change_nothing(KINDS[kind], seed, cascade=True)


@pytest.mark.parametrize("weights", BY_WEIGHTS)
def test_adapted_and_quantised_weights(weights: str, seed: int) -> None:
    assert_options_change_nothing(WEIGHTS[weights], seed, cascade=True)


@pytest.mark.usefixtures("without_inductor")
def test_log_probabilities_have_the_bits_of_the_model_alone(seed: int) -> None:
    """With `batch_invariant`, whose pages are rounded whether a prefill or a decode step writes them."""
    config = {"num_hidden_layers": 1, "eos_token_id": None, "head_dim": 32}
    scales, asked = kv_scales(tiny_qwen3(**config), [[*range(3, 60)]]), some_requests(seed, 6)
    model = invariant(tiny_qwen3(**config), kv_dtype="fp8_e4m3", kv_scales=scales)
    with Engine(model, max_num_seqs=6) as engine:
        outputs = answers_of(engine, asked, seed)
        assert engine.stats().cached_tokens > 0
    assert check_answers(model, asked, outputs) > 50
    assert model.compiled.model_runner().state.pages[0].dtype == torch.float8_e4m3fn
    assert_account_is_empty(model)
