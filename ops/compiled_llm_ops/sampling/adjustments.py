"""Logit adjustments before the temperature, in operations of PyTorch that do not wait for the device."""

# Shapes: R rows, n tokens that the tables lack, V vocabulary.

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from compiled_llm_ops.contracts.sampling import BIASED, CLEANED, COUNTED, FOLLOWING, MASKED, MAX_FOLLOWED

_MAX_COUNTED = 2**15 - 1
_HUGE = 1e30  # in place of infinities: no other logit is as large, and float32 has room above it


_Adjustments = TypeVar("_Adjustments", int, Tensor)


class AdjustmentTables(NamedTuple):
    """The tables of ``sample_tokens`` that change logits."""

    adjustments: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    allowed: Tensor
    biases: Tensor

    @classmethod
    def of(cls, tables: Any) -> AdjustmentTables:
        return cls(*(getattr(tables, name) for name in cls._fields))


class Noted(NamedTuple):
    """What rows have noted of the tokens before the one that is sampled: the tables that ``sample_tokens`` writes.

    Logits are adjusted by what was noted before the token. Who adjusts them again, to score it, copies this before it
    is sampled: a state may forget (a window of tokens loses the first one), and then nothing leads back from what it is
    afterwards.
    """

    counts: Tensor  # ``[R, V]`` int16
    recent: Tensor  # ``[R, MAX_FOLLOWED + 1]`` int32

    @classmethod
    def of(cls, tables: Any, slots: Tensor) -> Noted:
        """Copy what rows have in their ``slots`` ``[R]`` int64 of tables that are named as the fields."""
        return cls(*(getattr(tables, name)[slots] for name in cls._fields))

    def part(self, some: slice) -> Noted:
        """Return that of some rows."""
        return Noted(*(table[some] for table in self))


class Places(NamedTuple):
    """The rows and positions of sampled tokens."""

    slots: Tensor  # ``[R]`` int64
    positions: Tensor  # ``[R]`` int64


def adjusted(
    logits: Tensor,
    places: Places,
    tables: AdjustmentTables,
    noted: Noted,
    kinds: int,
    before: Tensor | None = None,
) -> Tensor:
    """Return logits ``[R, V]`` in float32, as the tables change them; ``kinds`` are all rows' adjustments, or-ed.

    ``before`` ``[R, n]`` int64 are the tokens before that the tables lack, the latest first, -1 for none.
    """
    counts = noted.counts
    if before is not None:
        for token in before.T:
            counts = counts.scatter(1, token.clamp(min=0)[:, None], _counted_once_more(counts, token)[:, None])
    scores, adjustments = logits.float(), tables.adjustments[places.slots][:, None]
    if kinds >= BIASED:
        scores = _biased(scores, places, tables, noted.recent, adjustments, followed(kinds), before)
    if kinds & COUNTED:
        scores = _penalised(scores, places.slots[:, None], tables, adjustments, counts)
    if kinds & CLEANED:
        scores = torch.where(adjustments & CLEANED != 0, scores.nan_to_num(0.0, _HUGE, -_HUGE), scores)
    if kinds & MASKED:
        bits = torch.arange(32, dtype=torch.int32, device=scores.device)
        allowed = (tables.allowed[places.slots][:, :, None] >> bits & 1).flatten(1)[:, : scores.shape[1]]
        scores = scores.masked_fill((adjustments & MASKED != 0) & (allowed == 0), -math.inf)
    return scores


def followed(adjustments: _Adjustments) -> _Adjustments:
    """Return how many tokens back a row's biases look, or each row's."""
    return adjustments // FOLLOWING & MAX_FOLLOWED


def _biased(
    scores: Tensor,
    places: Places,
    tables: AdjustmentTables,
    recent: Tensor,
    adjustments: Tensor,
    furthest: int,
    before: Tensor | None,
) -> Tensor:
    tokens, bits, first, end, *after = tables.biases[places.slots].unbind(dim=1)
    positions = places.positions[:, None]
    exists = (torch.arange(tokens.shape[1], device=tokens.device) < adjustments // BIASED) & (tokens < scores.shape[1])
    holds = exists & (first <= positions) & (positions < end)
    for back, wanted in enumerate(after[:furthest], start=1):
        has = recent.gather(1, (positions - back) % (MAX_FOLLOWED + 1))
        if before is not None and back <= before.shape[1]:
            has = torch.where(before[:, back - 1, None] < 0, has, before[:, back - 1, None])
        holds &= (adjustments // FOLLOWING & MAX_FOLLOWED < back) | (wanted < 0) | (wanted == has)
    values = torch.where(holds, bits.contiguous().view(torch.float32), 0.0)
    return scores.scatter_add(1, torch.where(holds, tokens, 0).long(), values)


def _penalised(scores: Tensor, slots: Tensor, tables: AdjustmentTables, adjustments: Tensor, counts: Tensor) -> Tensor:
    counts = torch.where(adjustments & COUNTED != 0, counts, 0)
    penalty = torch.where(counts != 0, tables.repetition_penalty[slots], 1.0)
    scores = torch.where(scores < 0, scores * penalty, scores / penalty)
    times = counts >> 1
    return scores - tables.frequency_penalty[slots] * times - tables.presence_penalty[slots] * (times > 0)


# ---- after a token is sampled


def note_tokens(counts: Tensor, recent: Tensor, places: Places, tokens: Tensor, adjustments: Tensor) -> None:
    """Count and remember the tokens ``[R]`` int64 of rows whose ``adjustments`` ``[R]`` ask for it; none below 0."""
    slots, positions = places
    counted = (tokens >= 0) & (adjustments & COUNTED != 0)
    if bool(counted.any()):
        own = counts[slots[counted]]
        counts[slots[counted], tokens[counted]] = _counted_once_more(own, tokens[counted])
    remembered = (tokens >= 0) & (followed(adjustments) > 0)
    if bool(remembered.any()):
        recent[slots[remembered], positions[remembered] % (MAX_FOLLOWED + 1)] = tokens[remembered].int()


def _counted_once_more(counts: Tensor, tokens: Tensor) -> Tensor:
    """Return ``[R]``, what ``counts`` ``[R, V]`` have of one token of each row, counted; of token 0 if it is -1."""
    now = counts.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
    return torch.where((tokens >= 0) & (now < _MAX_COUNTED - 1), now + 2, now)
