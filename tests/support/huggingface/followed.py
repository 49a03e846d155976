"""Whether tokens of a bfloat16 model are those that HuggingFace's processors choose, but for what noise decides.

Equal tokens are no measure: after the first near tie two texts have nothing in common. Here the reference follows the
text, so that each step is judged by itself.

Shapes: B rows, T prompt columns, G new tokens, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from support.execution.twins import BEYOND_NOISE

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
