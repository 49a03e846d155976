"""`batch_invariant=True` on a GPU: bits of any batch, chunk, bucket and mode are those of the model called alone."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm_ops import top_logprobs
from support.engine.invariant_answers import Asked, answers_of, check_forwards, some_requests
from support.engine.invariant_kinds import FAMILIES as RECURRENT_SIZES, KINDS, LATENTS, WHOLE
from support.execution.twins import OPTIONS, SMALL, random_model, small_qwen3
from support.huggingface.recurrent_families import CONFIGS, RECURRENT
from support.latent_models import LATENT
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.gpu


def _recurrent(family: str, seed: int) -> Any:
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))
    sizes = {**WHOLE, **RECURRENT[family], **RECURRENT_SIZES[family], "vocab_size": SMALL["vocab_size"]}
    return random_model(config(**sizes), seed)


MODES: dict[str, dict[str, Any]] = {
    "cuda-graphs": {},
    "3 graphs": {"max_graphs": 3},
    "fp8": {"kv_dtype": "fp8_e4m3"},
    "piecewise": {"mode": "piecewise"},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "compile": {"mode": "compile"},
}


def _latents(seed: int) -> Any:
    sizes = {
        **LATENT,
        **LATENTS,
        "kv_lora_rank": 64,
        "vocab_size": SMALL["vocab_size"],
        "max_position_embeddings": 2048,
    }
    return random_model(transformers.DeepseekV3Config(**sizes), seed)


OTHER_KINDS: dict[str, Callable[[int], Any]] = {
    **{
        family: functools.partial(_recurrent, family)
        for family in ("Qwen3_5", "FalconH1", "Lfm2")
        if family in RECURRENT
    },
    **({"latents": _latents} if "latents" in KINDS else {}),
}
"""Models whose layers are not all attention over all keys."""


@pytest.fixture(scope="module", params=[*MODES, *OTHER_KINDS])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    options = {**OPTIONS, "kv_memory": "3000 tokens", "prefill_tokens": 64, **MODES.get(request.param, {})}
    plain = OTHER_KINDS.get(request.param, small_qwen3)(request.config.getoption("seed"))
    wrapped = compiled_llm.wrap(plain, **options, batch_invariant=True)
    yield wrapped
    compiled_llm.unwrap(wrapped)
    gc.collect()


@torch.no_grad()
def check_answers_on_the_gpu(model: PreTrainedModel, asked: list[Asked], outputs: list[Any]) -> None:
    """By our op of log-probabilities, whose bits do not depend on the number of rows either."""
    for (ids, _), output in zip(asked, outputs, strict=True):
        for answer in output.outputs:
            text = [*ids, *answer.token_ids]
            logits = model(torch.tensor([text], device=model.device), use_cache=False).logits[0]
            following = torch.tensor([*text[1:], 0], device=model.device)
            scores = top_logprobs(logits, following, 0)[:, 0].contiguous().view(torch.float32).tolist()
            for at, (token, given) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True), len(ids) - 1):
                assert given[token].logprob == scores[at], (at, len(ids))


@pytest.mark.parametrize("few_pages", [False, True])
def test_answers_have_the_bits_of_the_teacher_forced_model(
    model: PreTrainedModel, few_pages: bool, seed: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if few_pages:
        monkeypatch.setitem(POLICIES, "auto", Greedy)
    count = 1000 if request.config.getoption("--whole") else 60
    asked = some_requests(seed, count, SMALL["vocab_size"], 150, answers=120 if few_pages else 16)
    with Engine(model, max_num_seqs=40 if few_pages else 12) as engine:
        outputs = answers_of(engine, asked, seed, waits=0.05 if few_pages else 0.3)
        assert engine.stats().cached_tokens > 0
        assert not few_pages or engine.stats().preemptions > 0
    check_answers_on_the_gpu(model, asked, outputs)
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (0, 0, 0)
    assert_account_is_empty(model)


def test_rows_of_any_batch_have_the_bits_of_the_row_alone(
    model: PreTrainedModel, seed: int, request: pytest.FixtureRequest
) -> None:
    check_forwards(model, seed, 1000 if request.config.getoption("--whole") else 50, longest=100)


def test_decode_steps_of_up_to_256_rows_have_them(seed: int) -> None:
    """In each bucket, beside rows of any lengths."""
    options = {**OPTIONS, "kv_memory": "60000 tokens", "max_batch_size": 8}
    model = compiled_llm.wrap(small_qwen3(seed), **options, batch_invariant=True)
    for rows in (1, 3, 17, 64, 100, 256):
        asked = some_requests(seed + rows, rows, SMALL["vocab_size"], longest=random.Random(rows).choice([10, 100]))
        with Engine(model, max_num_seqs=256) as engine:
            outputs = engine.generate([ids for ids, _ in asked], [params for _, params in asked])
        check_answers_on_the_gpu(model, asked, outputs)
