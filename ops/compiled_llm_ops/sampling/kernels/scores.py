"""The scores of a row's tokens, as its settings change them, and its filters, for the kernels of ``sampling``."""

# Scores are multiplied by reciprocals, as PyTorch does when it divides by a number on CUDA.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from compiled_llm_ops.contracts.sampling import (
    BIASED,
    CLEANED,
    COUNTED,
    DEFERRED,
    FOLLOWING,
    MASKED,
    MAX_BIASES,
    MAX_FOLLOWED,
    TILE,
)

_TILE = tl.constexpr(TILE)
_COUNTED, _MASKED, _CLEANED, _BIASED = (tl.constexpr(kind) for kind in (COUNTED, MASKED, CLEANED, BIASED))
_FOLLOWING = tl.constexpr(FOLLOWING)
_DEFERRED = tl.constexpr(DEFERRED)
_MAX_FOLLOWED = tl.constexpr(MAX_FOLLOWED)
_MAX_BIASES = tl.constexpr(MAX_BIASES)
_NO_TOKEN = tl.constexpr(2**31 - 1)
_MAX_COUNTED = tl.constexpr(2**15 - 1)
_HUGE = tl.constexpr(1e30)


class ScoreSource(NamedTuple):
    """What the scores of one row are made of; of each table, where the row's part begins.

    A part is there whether it is read or not; it is read if the row's ``adjustments`` say so: penalties and ``counts``
    with COUNTED, ``allowed`` with MASKED, ``biases`` with BIASED, ``recent`` with FOLLOWING, and ``position`` with
    either of the last two.
    """

    logits: tl.tensor
    adjustments: tl.tensor  # flags, the number itself
    vocabulary: tl.tensor  # how many tokens there are
    scale: tl.tensor  # what logits are multiplied by: the reciprocal of the temperature
    position: tl.tensor  # where that of the sampled token is
    repetition: tl.tensor
    presence: tl.tensor
    frequency: tl.tensor
    counts: tl.tensor  # ``[V]`` int16
    allowed: tl.tensor  # ``[ceil(V / 32)]`` int32
    biases: tl.tensor  # ``[4 + MAX_FOLLOWED, MAX_BIASES]`` int32
    recent: tl.tensor  # ``[MAX_FOLLOWED + 1]`` int32
    before: tl.tensor  # ``[drafts]`` int64, tokens that ``counts`` and ``recent`` lack, the latest first
    drafts: tl.tensor  # how many they are; 0 if the tables have all, and ``before`` is not read


@triton.jit
def source_of(
    logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
    biases, recent, before, width, vocabulary,
):  # fmt: skip
    """Return the inputs of the scores of this program's row, its entry in the tables, and its temperature."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    row_temperature = tl.load(temperature + slot)
    # A temperature of 0 takes the most likely token, which no scale changes.
    scale = 1.0 / tl.where(row_temperature == 0.0, 1.0, row_temperature)
    source = ScoreSource(
        logits=logits + row * stride,
        adjustments=tl.load(adjustments + slot),
        vocabulary=vocabulary,
        scale=scale,
        position=positions + row,
        repetition=repetition + slot,
        presence=presence + slot,
        frequency=frequency + slot,
        counts=counts + slot * vocabulary,
        allowed=allowed + slot * tl.cdiv(vocabulary, 32),
        biases=biases + slot * ((4 + _MAX_FOLLOWED) * _MAX_BIASES),
        recent=recent + slot * (_MAX_FOLLOWED + 1),
        before=slots if before is None else before + row * width,
        drafts=0 if before is None else width,
    )
    return source, row, slot, row_temperature


@triton.jit
def is_served(source, deferred):
    """Return whether this launch serves this program's row."""
    return ((source.adjustments & _DEFERRED) != 0) == (deferred != 0)


@triton.jit
def filters_of(top_k, top_p, min_p, slot, vocabulary):
    """Return a row's top-k, 0 if it keeps all, its top-p and min-p, and whether tokens are proposed for it."""
    k, p, m = tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot)
    k = tl.where(k < vocabulary, k, 0)
    return k, p, m, (k <= 0) & (p < 1.0)


@triton.jit
def scores_of(source, token, first=None):
    """Return float32 scores of one row's tokens: -inf if there is no such token, +inf for NaN."""
    # ``first`` is the least of the tokens, if they are neighbours.
    # +inf makes the row's largest score infinite, by which the row is recognised as one that cannot be drawn from.
    scores = logits_of(source, token, first) * source.scale
    return tl.where(scores < float("inf"), scores, float("inf"))


@triton.jit
def logits_of(source, token, first=None):
    """Return float32 logits of one row's tokens, as its settings change them; -inf if there is no such token."""
    mask = token < source.vocabulary
    logits = tl.load(source.logits + token, mask=mask, other=float("-inf")).to(tl.float32)
    adjustments = source.adjustments
    if adjustments != 0:
        if adjustments >= _BIASED:
            logits = _biased(logits, token, source)
        if (adjustments & _COUNTED) != 0:
            logits = _penalised(logits, source, token, first)
        if (adjustments & _CLEANED) != 0:
            logits = tl.where(logits == logits, tl.minimum(tl.maximum(logits, -_HUGE), _HUGE), 0.0)
            logits = tl.where(mask, logits, float("-inf"))
        if (adjustments & _MASKED) != 0:
            words = tl.load(source.allowed + (token >> 5), mask=mask, other=0)
            logits = tl.where(((words >> (token & 31)) & 1) != 0, logits, float("-inf"))
    return logits


@triton.jit
def _biased(logits, token, source):
    """Add the biases that hold to tokens that come in whole tiles; each tile looks at its own biases alone."""
    groups: tl.constexpr = token.shape[0] // _TILE
    adjustments, position, biases = source.adjustments, tl.load(source.position), source.biases
    logits, token = tl.reshape(logits, (groups, _TILE)), tl.reshape(token, (groups, _TILE))
    first_token, total = tl.min(token, axis=1), adjustments // _BIASED
    at = _entries_below(biases, total, first_token)
    own = tl.load(biases + at, mask=at < total, other=_NO_TOKEN)
    exists = own < first_token + _TILE  # a second search for the end would take as long as all else here
    followed = (adjustments // _FOLLOWING) & _MAX_FOLLOWED
    while tl.max(exists.to(tl.int32), axis=0) != 0:
        bias = biases + at
        value = tl.load(bias + _MAX_BIASES, mask=exists, other=0).to(tl.float32, bitcast=True)
        holds = exists & (tl.load(bias + 2 * _MAX_BIASES, mask=exists, other=0) <= position)
        holds = holds & (position < tl.load(bias + 3 * _MAX_BIASES, mask=exists, other=0))
        for back in range(1, followed + 1):
            wanted = tl.load(bias + (3 + back) * _MAX_BIASES, mask=exists, other=-1)
            holds = holds & ((wanted < 0) | (wanted == _token_before(source, position, back)))
        logits += tl.where(token == tl.where(holds, own, -1)[:, None], value[:, None], 0.0)
        at += 1
        own = tl.load(biases + at, mask=at < total, other=_NO_TOKEN)
        exists = own < first_token + _TILE
    return tl.reshape(logits, (groups * _TILE,))


@triton.jit
def _token_before(source, position, back):
    """Return the token that stands so many places before the sampled one."""
    token = tl.load(source.recent + ((position - back) & _MAX_FOLLOWED))
    if source.drafts > 0:
        new = tl.load(source.before + back - 1, mask=back <= source.drafts, other=-1).to(tl.int32)
        token = tl.where(new < 0, token, new)
    return token


@triton.jit
def _entries_below(biases, count, token):
    """Return how many of the first ``count`` biases, whose tokens ascend, have a token below each of ``token``."""
    low = tl.zeros_like(token)
    high = low + count
    for _ in tl.static_range(10):  # 2**9 biases at most
        middle = (low + high) // 2
        inside = low < high
        below = inside & (tl.load(biases + middle, mask=inside, other=_NO_TOKEN) < token)
        low = tl.where(below, middle + 1, low)
        high = tl.where(inside & ~below, middle, high)
    return low


@triton.jit
def _penalised(logits, source, token, first):
    """Apply the penalties for tokens of the prompt, and for sampled ones."""
    repetition, presence, frequency = tl.load(source.repetition), tl.load(source.presence), tl.load(source.frequency)
    counts = tl.load(source.counts + token, mask=token < source.vocabulary, other=0)
    if _may_have_drafts(source, token, first):
        for back in range(source.drafts):
            more = (token == tl.load(source.before + back).to(tl.int32)) & (counts < _MAX_COUNTED - 1)
            counts = tl.where(more, counts + 2, counts)
    repeated = tl.where(logits < 0, logits * repetition, logits * (1.0 / repetition))
    logits = tl.where(counts != 0, repeated, logits)
    times = counts >> 1
    return logits - frequency * times.to(tl.float32) - tl.where(times > 0, presence, 0.0)


@triton.jit
def _may_have_drafts(source, token, first):
    """Return whether tokens that the tables lack may be among these: few of a row's blocks of neighbours have any."""
    may = source.drafts > 0
    if first is not None:
        back = tl.arange(0, _MAX_FOLLOWED + 1)
        draft = tl.load(source.before + back, mask=back < source.drafts, other=-1)
        may = tl.max(((draft >= first) & (draft < first + token.shape[0])).to(tl.int32), axis=0) != 0
    return may


@triton.jit
def count_token(source, token):
    """Count a sampled token, and store its position."""
    if (source.adjustments & _COUNTED) != 0:
        place = source.counts + token
        before = tl.load(place).to(tl.int32)
        tl.store(place, tl.where(before < _MAX_COUNTED - 1, before + 2, before).to(tl.int16))
    if ((source.adjustments // _FOLLOWING) & _MAX_FOLLOWED) != 0:
        tl.store(source.recent + (tl.load(source.position) & _MAX_FOLLOWED), token.to(tl.int32))
