"""What changes logits before the temperature, in operations of PyTorch that wait for nothing.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_llm_ops.contracts import (
    BIASED,
    CLEANED,
    COUNTED,
    FOLLOWING,
    GROWING,
    MASKED,
    MOST_FOLLOWED,
    PROMPTED,
    SampleTokens,
    Seldom,
)

_PROMPT_PENALTY, _GROWTH = map(Seldom._fields.index, ("prompt_penalty", "growth"))
_HUGE = 1e30  # in place of infinities: no other logit is as large, and float32 has room above it
_FORCED = 1e19  # so large are the logits of tokens that are forced


def edited(args: SampleTokens, counts: Tensor, kinds: int) -> Tensor:
    """Return ``[R, V]`` float32 logits, as the tables change them.

    Args:
        args: of ``sample_tokens``.
        counts: ``[R, V]`` int16, those of the rows.
        kinds: the edits of all rows, or-ed together.
    """
    scores, edits = args.logits.float(), args.edits[args.slots][:, None]
    if kinds >= BIASED:
        scores = _biased(scores, args, edits, followed(kinds))
    if kinds & COUNTED:
        scores = _penalised(scores, args, edits, counts)
    if kinds & CLEANED:
        scores = torch.where(edits & CLEANED != 0, scores.nan_to_num(0.0, _HUGE, -_HUGE), scores)
    if kinds & GROWING:
        scores = _grown(scores, args, edits)
    if kinds & MASKED:
        bits = torch.arange(32, dtype=torch.int32, device=scores.device)
        allowed = (args.allowed[args.slots][:, :, None] >> bits & 1).flatten(1)[:, : scores.shape[1]]
        scores = scores.masked_fill((edits & MASKED != 0) & (allowed == 0), -math.inf)
    return scores


def followed(edits: int) -> int:
    """Return how many tokens back a row's biases look."""
    return edits // FOLLOWING & MOST_FOLLOWED


def _biased(scores: Tensor, args: SampleTokens, edits: Tensor, furthest: int) -> Tensor:
    tokens, bits, first, end, *after = args.biases[args.slots].unbind(dim=1)
    positions = args.positions[:, None]
    exists = (torch.arange(tokens.shape[1], device=tokens.device) < edits // BIASED) & (tokens < scores.shape[1])
    holds = exists & (first <= positions) & (positions < end)
    for back, wanted in enumerate(after[:furthest], start=1):
        has = args.recent[args.slots, (args.positions - back) % (MOST_FOLLOWED + 1)][:, None]
        holds &= (edits // FOLLOWING & MOST_FOLLOWED < back) | (wanted < 0) | (wanted == has)
    values = torch.where(holds, bits.contiguous().view(torch.float32), 0.0)
    return scores.scatter_add(1, torch.where(holds, tokens, 0).long(), values)


def _penalised(scores: Tensor, args: SampleTokens, edits: Tensor, counts: Tensor) -> Tensor:
    slots, counts = args.slots[:, None], torch.where(edits & COUNTED != 0, counts, 0)
    of_prompt = torch.where(edits & PROMPTED != 0, args.seldom[slots, _PROMPT_PENALTY], 1.0)
    scores = _repeated(scores, torch.where(counts & 1 != 0, of_prompt, 1.0))
    scores = _repeated(scores, torch.where(counts != 0, args.repetition_penalty[slots], 1.0))
    times = counts >> 1
    return scores - args.frequency_penalty[slots] * times - args.presence_penalty[slots] * (times > 0)


def _repeated(scores: Tensor, penalty: Tensor) -> Tensor:
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def _grown(scores: Tensor, args: SampleTokens, edits: Tensor) -> Tensor:
    begins, *tokens = args.growing[args.slots].unbind(dim=1)
    steps = (args.positions - begins).clamp(min=0)
    growth = ((steps * args.seldom[args.slots, _GROWTH]).exp2() - 1)[:, None]
    for token in tokens:
        grows = (edits & GROWING != 0) & (token >= 0)[:, None] & (token < scores.shape[1])[:, None]
        at = torch.where(grows, token[:, None], 0).long()
        logits = scores.gather(1, at)
        more = torch.where(grows & (logits.abs() < _FORCED), logits.abs() * growth, 0.0)
        scores = scores.scatter_add(1, at, more)
    return scores
