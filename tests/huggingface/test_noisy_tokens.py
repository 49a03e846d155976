"""In bfloat16, each token is the one that HuggingFace's processors choose, but for near ties; on a GPU captured."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

import compiled_llm
from support.execution.twins import BEYOND_NOISE, DEVICE, in_float32, on_device
from support.parity import greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

ENDS = [17, 5, 99]
NEW_TOKENS = 40
SETTINGS: dict[str, dict[str, Any]] = {
    "min_new_tokens": {"min_new_tokens": 30},
    "min_length": {"min_length": 110},
    "suppress_tokens": {"suppress_tokens": list(range(64))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(100))},
    "bad_words_ids": {"bad_words_ids": [[token] for token in range(20, 64)]},
    "sequence_bias": {"sequence_bias": {(9,): 2.0, (60,): -3.0}},
    "forced_eos_token_id": {"forced_eos_token_id": [17, 5]},
    "remove_invalid_values": {"remove_invalid_values": True},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.3},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.05)},
}


class Follow(LogitsProcessor):
    """Keeps the scores of each step, as processors before it made them, and chooses the next token of a text."""

    def __init__(self, text: Tensor) -> None:
        self.scores: list[Tensor] = []  # of each step, `[B, V]`
        self._text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.scores.append(scores.clone())
        chosen = self._text[:, input_ids.shape[1], None]
        return torch.full_like(scores, -math.inf).scatter(1, chosen, 0.0)


class Judgement(NamedTuple):
    """What became of the tokens of a text."""

    steps: int  # how many tokens were judged
    others: int  # how many are not those of the reference
    # by how much the widest gap between the reference's best token and the text's is noise, 1 for all of it
    widest: float


def judged(
    text: Tensor, exact: PreTrainedModel, theirs: PreTrainedModel, inputs: dict[str, Tensor], **options: Any
) -> Judgement:
    """Judge `[B, T + G]` by HuggingFace's processors over a float32 reference; noise is what its own bfloat16 adds."""
    scores, noisy = (_followed(model, text, inputs, **options) for model in (exact, theirs))
    rows = text[:, inputs["input_ids"].shape[1] :]
    assert scores.dtype == noisy.dtype == torch.float32, "HuggingFace processes float32"
    ends = torch.isin(rows, torch.tensor(ENDS, device=rows.device)).long()
    running = ends.cumsum(dim=1) - ends == 0  # up to the one that ends a row
    finite = (scores.abs() < 1e6) & (noisy.abs() < 1e6)
    errors = torch.where(finite, scores - noisy, 0.0)
    noise = (errors.square().sum(dim=-1) / finite.sum(dim=-1).clamp(min=1)).sqrt()
    noise = noise.maximum(noise[running].square().mean().sqrt()) + 1e-6
    chosen = scores.gather(2, rows[:, :, None])[:, :, 0]
    gaps = (scores.amax(dim=-1) - chosen)[running]
    return Judgement(len(gaps), int((gaps > 0).sum()), float((gaps / (BEYOND_NOISE * noise[running])).max()))


def _followed(model: PreTrainedModel, text: Tensor, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """Return `[B, G, V]`, the processed scores of a model that follows a text."""
    follow = Follow(text)
    new = text.shape[1] - inputs["input_ids"].shape[1]
    model.generate(
        **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=ENDS, pad_token_id=0,
        logits_processor=LogitsProcessorList([follow]), **options,
    )  # fmt: skip
    return torch.stack(follow.scores, dim=1)[:, :new]


def assert_chosen_by_huggingfaces_processors(judgement: Judgement) -> None:
    print(judgement)
    assert judgement.steps > 20
    assert judgement.widest <= 1, f"a token that noise does not explain: {judgement}"


OPTIONS: dict[str, Any] = {"page_size": 16, "max_batch_size": 8, "progress": False}

Three = tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]
"""HuggingFace's in float32 and in bfloat16, and a wrapped one."""


def noisy() -> PreTrainedModel:
    return tiny_qwen3(head_dim=64, hidden_size=256, eos_token_id=None).to(torch.bfloat16)


@pytest.fixture(scope="module")
def three() -> Three:
    plain = noisy()
    return copy.deepcopy(plain).float(), plain, compiled_llm.wrap(copy.deepcopy(plain), mode="eager", **OPTIONS)


@pytest.fixture(scope="module")
def three_on_gpu() -> Iterator[Three]:
    plain = noisy().to(DEVICE)
    wrapped = compiled_llm.wrap(copy.deepcopy(plain), **OPTIONS)
    yield in_float32(plain), plain, wrapped
    compiled_llm.unwrap(wrapped)
    gc.collect()


def assert_chosen(three: Three, inputs: dict[str, torch.Tensor], name: str) -> None:
    exact, theirs, wrapped = three
    options = {"eos_token_id": ENDS, "pad_token_id": 0, **SETTINGS[name]}
    text = greedy(wrapped, inputs, NEW_TOKENS, **options)
    assert_chosen_by_huggingfaces_processors(judged(text, exact, theirs, inputs, **SETTINGS[name]))
    assert wrapped.compiled.stats().generate_calls.keys() == {"fast loop"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if "s_t" in n else pytest.mark.whole) for n in SETTINGS])
def test_tokens_are_chosen_by_huggingfaces_processors(name: str, three: Three, seed: int) -> None:
    assert_chosen(three, mixed_prompts([40, 90, 60], 128, seed), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("repeat", range(3))
def test_on_a_gpu_as_well(name: str, repeat: int, three_on_gpu: Three, seed: int) -> None:
    assert_chosen(three_on_gpu, on_device(mixed_prompts([40, 90, 60], 128, seed + repeat)), name)
    assert three_on_gpu[2].compiled.stats().recompiles == 0


def test_tokens_that_are_not_are_noticed(three: Three, seed: int) -> None:
    exact, theirs, wrapped = three
    inputs = mixed_prompts([40, 90, 60], 128, seed)
    text = greedy(wrapped, inputs, NEW_TOKENS, eos_token_id=ENDS, pad_token_id=0)
    assert judged(text, exact, theirs, inputs).widest <= 1
    for name in ("suppress_tokens", "repetition_penalty", "begin_suppress_tokens"):
        assert judged(text, exact, theirs, inputs, **SETTINGS[name]).widest > 1, name
