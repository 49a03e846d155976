"""Logit adjustments before the temperature, in operations of PyTorch that do not wait for the device."""

# Shapes: R rows, V vocabulary.

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.contracts.sampling import BIASED, CLEANED, COUNTED, FOLLOWING, MASKED, MAX_FOLLOWED

_HUGE = 1e30  # in place of infinities: no other logit is as large, and float32 has room above it


class AdjustmentTables(NamedTuple):
    """The tables of ``sample_tokens`` that change logits."""

    adjustments: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    allowed: Tensor
    biases: Tensor
    recent: Tensor

    @classmethod
    def of(cls, tables: Any) -> AdjustmentTables:
        return cls(*(getattr(tables, name) for name in cls._fields))


class Places(NamedTuple):
    """The rows and positions of sampled tokens."""

    slots: Tensor  # ``[R]`` int64
    positions: Tensor  # ``[R]`` int64


def adjusted(logits: Tensor, places: Places, tables: AdjustmentTables, counts: Tensor, kinds: int) -> Tensor:
    """Return logits ``[R, V]`` in float32, as the tables change them; ``kinds`` are all rows' adjustments, or-ed."""
    scores, adjustments = logits.float(), tables.adjustments[places.slots][:, None]
    if kinds >= BIASED:
        scores = _biased(scores, places, tables, adjustments, followed(kinds))
    if kinds & COUNTED:
        scores = _penalised(scores, places.slots[:, None], tables, adjustments, counts)
    if kinds & CLEANED:
        scores = torch.where(adjustments & CLEANED != 0, scores.nan_to_num(0.0, _HUGE, -_HUGE), scores)
    if kinds & MASKED:
        bits = torch.arange(32, dtype=torch.int32, device=scores.device)
        allowed = (tables.allowed[places.slots][:, :, None] >> bits & 1).flatten(1)[:, : scores.shape[1]]
        scores = scores.masked_fill((adjustments & MASKED != 0) & (allowed == 0), -math.inf)
    return scores


def followed(adjustments: int) -> int:
    """Return how many tokens back a row's biases look."""
    return adjustments // FOLLOWING & MAX_FOLLOWED


def _biased(scores: Tensor, places: Places, tables: AdjustmentTables, adjustments: Tensor, furthest: int) -> Tensor:
    tokens, bits, first, end, *after = tables.biases[places.slots].unbind(dim=1)
    positions = places.positions[:, None]
    exists = (torch.arange(tokens.shape[1], device=tokens.device) < adjustments // BIASED) & (tokens < scores.shape[1])
    holds = exists & (first <= positions) & (positions < end)
    for back, wanted in enumerate(after[:furthest], start=1):
        has = tables.recent[places.slots, (places.positions - back) % (MAX_FOLLOWED + 1)][:, None]
        holds &= (adjustments // FOLLOWING & MAX_FOLLOWED < back) | (wanted < 0) | (wanted == has)
    values = torch.where(holds, bits.contiguous().view(torch.float32), 0.0)
    return scores.scatter_add(1, torch.where(holds, tokens, 0).long(), values)


def _penalised(scores: Tensor, slots: Tensor, tables: AdjustmentTables, adjustments: Tensor, counts: Tensor) -> Tensor:
    counts = torch.where(adjustments & COUNTED != 0, counts, 0)
    penalty = torch.where(counts != 0, tables.repetition_penalty[slots], 1.0)
    scores = torch.where(scores < 0, scores * penalty, scores / penalty)
    times = counts >> 1
    return scores - tables.frequency_penalty[slots] * times - tables.presence_penalty[slots] * (times > 0)
