"""The CUDA kernels of ``sampling``, in Triton."""

# The first kernel reads the logits once, with the whole device, and writes the largest score of each tile of
# neighbouring tokens, its mass, and the logarithm of its random number. The last samples, one program a row. All branch
# on the row's settings on the device, so that neither the host nor a captured graph has to know them. A tile is drawn
# first and then a token of it (see ``race``), so a row without filters reads one tile; if few tokens can be kept, those
# tiles in which they lie.
# A nucleus without top-k may hold any number of tokens, and to find where it ends takes many passes over the row.
# Whether one token is in it takes one: the tokens that are likelier have too little mass to fill it. So some tokens are
# drawn from the whole row, the second kernel weighs what is likelier than each, with the whole device, and the first
# one in the nucleus is taken, as likely as if it had been drawn from there.
# Scores are multiplied by reciprocals, as PyTorch does when it divides by a number on CUDA.
# Shapes: B rows, V vocabulary, C candidates, X entries of the tables of settings.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.contracts.sampling import (
    BIASED,
    CLEANED,
    COUNTED,
    DEFERRED,
    FOLLOWING,
    MASKED,
    MAX_BIASES,
    MAX_FOLLOWED,
    PROPOSALS,
    TILE,
)
from compiled_llm_ops.sampling.kernels.race import log_exponentials_of_tiles, log_exponentials_of_tokens
from compiled_llm_ops.sampling.sampling import SampleTokens

_TILE = tl.constexpr(TILE)
_SPAN = tl.constexpr(2048)
_CHUNK = tl.constexpr(4096)
_CANDIDATES = tl.constexpr(256)
_PROPOSALS = tl.constexpr(PROPOSALS)
_PARTS = tl.constexpr(8)  # of a row, which are weighed apart: as many whatever the batch is, so that sums stay the same
_PART_CHUNK = tl.constexpr(1024)
# exp(-104) is 0 in float32: a token whose score is further below the largest is never drawn.
_REACH = tl.constexpr(104.0)
_COUNTED, _MASKED, _CLEANED, _BIASED = (tl.constexpr(kind) for kind in (COUNTED, MASKED, CLEANED, BIASED))
_FOLLOWING = tl.constexpr(FOLLOWING)
_DEFERRED = tl.constexpr(DEFERRED)
_MAX_FOLLOWED = tl.constexpr(MAX_FOLLOWED)
_MAX_BIASES = tl.constexpr(MAX_BIASES)
_NO_TOKEN = tl.constexpr(2**31 - 1)
_MAX_COUNTED = tl.constexpr(2**15 - 1)
_HUGE = tl.constexpr(1e30)
_WIDE_WARPS = 4
_WIDE_REGISTERS = (
    48  # what rows without logit adjustments need; without a bound, others would leave room for fewer blocks of them
)
_PART_WARPS = 8
_ROW_WARPS = 16


def sample_tokens(args: SampleTokens, not_a_token: int) -> Tensor:
    """Launch the kernels, and return ``[B]`` int64; ``args`` are checked, with logits of at most 32 bits."""
    sampled = torch.empty(args.logits.shape[0], dtype=torch.int64, device=args.logits.device)
    for kernel, grid, arguments, options in _launches(args, sampled, not_a_token):
        kernel[grid](*arguments, **options)
    return sampled


def build(args: SampleTokens, not_a_token: int) -> None:
    """Build the kernels for the current device, unless they are cached, by the dtypes and strides of ``args``."""
    sampled = torch.empty(args.logits.shape[0], dtype=torch.int64, device=args.logits.device)
    for kernel, grid, arguments, options in _launches(args, sampled, not_a_token):
        kernel.warmup(*arguments, grid=grid, **options)


class _Launch(NamedTuple):
    """A kernel with all arguments of its launch, or build."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, int]


def _launches(args: SampleTokens, sampled: Tensor, not_a_token: int) -> Iterable[_Launch]:
    """Return the launches that sample, in order; ``sampled`` is written."""
    logits = args.logits if args.logits.stride(1) == 1 else args.logits.contiguous()
    rows, vocabulary = logits.shape
    tiles = triton.cdiv(vocabulary, _TILE.value)
    device = logits.device
    largest = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    mass = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    behind = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    found = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    candidates = torch.empty(rows, _CANDIDATES.value, dtype=torch.int32, device=device)
    candidate_scores = torch.empty(rows, _CANDIDATES.value, dtype=torch.float32, device=device)
    tables = (
        args.slots, args.positions, args.temperature, args.adjustments, args.repetition_penalty, args.presence_penalty,
        args.frequency_penalty, args.counts, args.allowed, args.biases, args.recent,
    )  # fmt: skip
    spans = triton.cdiv(vocabulary, _SPAN.value)
    leads = torch.empty(rows, spans, PROPOSALS, dtype=torch.float32, device=device)
    leaders = torch.empty(rows, spans, PROPOSALS, dtype=torch.int32, device=device)
    proposed = torch.empty(rows, PROPOSALS, dtype=torch.int32, device=device)
    reached = torch.empty(rows, PROPOSALS, dtype=torch.float32, device=device)
    above = torch.empty(rows, _PARTS.value, PROPOSALS, dtype=torch.float32, device=device)
    shared = (
        logits,
        logits.stride(0),
        *tables,
        int(args.deferred),
        vocabulary,
        args.seeds,
        args.top_k,
        args.top_p,
        largest,
        mass,
        behind,
        tiles,
    )
    wide = {"num_warps": _WIDE_WARPS, "maxnreg": _WIDE_REGISTERS}
    yield _Launch(_summarise_for_sampling, (rows, spans), (*shared, leads, leaders), wide)
    padded = {"padded_tiles": triton.next_power_of_2(tiles)}
    proposals = (proposed, reached, above)
    parts = {**padded, "padded_spans": triton.next_power_of_2(spans), "num_warps": _PART_WARPS}
    yield _Launch(_weigh_proposals, (rows, _PARTS.value), (*shared, leads, leaders, spans, *proposals), parts)
    results = (found, candidates, candidate_scores, sampled, not_a_token)
    narrow = {**padded, "num_warps": _ROW_WARPS}
    yield _Launch(_sample_rows, (rows,), (*shared, *proposals, args.min_p, *results), narrow)


@triton.jit
def _source(
    logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
    biases, recent, vocabulary,
):  # fmt: skip
    """Return the inputs of the scores of this program's row, its entry in the tables, and its temperature."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    row_temperature = tl.load(temperature + slot)
    # A temperature of 0 takes the most likely token, which no scale changes.
    scale = 1.0 / tl.where(row_temperature == 0.0, 1.0, row_temperature)
    source = (
        logits + row * stride, tl.load(adjustments + slot), vocabulary, scale, positions + row, repetition + slot,
        presence + slot, frequency + slot, counts + slot * vocabulary, allowed + slot * tl.cdiv(vocabulary, 32),
        biases + slot * ((4 + _MAX_FOLLOWED) * _MAX_BIASES), recent + slot * (_MAX_FOLLOWED + 1),
    )  # fmt: skip
    return source, row, slot, row_temperature


@triton.jit
def _is_served(source, deferred):
    """Return whether this launch serves this program's row."""
    return ((source[1] & _DEFERRED) != 0) == (deferred != 0)


@triton.jit
def _filters(top_k, top_p, slot, vocabulary):
    """Return a row's top-k, 0 if it keeps all, its top-p, and whether tokens are proposed for it."""
    k, p = tl.load(top_k + slot), tl.load(top_p + slot)
    k = tl.where(k < vocabulary, k, 0)
    return k, p, (k <= 0) & (p < 1.0)


@triton.jit
def _scores(source, token):
    """Return float32 scores of one row's tokens: -inf if there is no such token, +inf for NaN."""
    # +inf makes the row's largest score infinite, by which the row is recognised as one that cannot be drawn from.
    scores = _logits(source, token) * source[3]
    return tl.where(scores < float("inf"), scores, float("inf"))


@triton.jit
def _logits(source, token):
    """Return float32 logits of one row's tokens, as its settings change them; -inf if there is no such token."""
    mask = token < source[2]
    logits = tl.load(source[0] + token, mask=mask, other=float("-inf")).to(tl.float32)
    adjustments = source[1]
    if adjustments != 0:
        if adjustments >= _BIASED:
            logits = _biased(logits, token, source[10], source[11], adjustments, tl.load(source[4]))
        if (adjustments & _COUNTED) != 0:
            logits = _penalised(logits, source, token)
        if (adjustments & _CLEANED) != 0:
            logits = tl.where(logits == logits, tl.minimum(tl.maximum(logits, -_HUGE), _HUGE), 0.0)
            logits = tl.where(mask, logits, float("-inf"))
        if (adjustments & _MASKED) != 0:
            words = tl.load(source[9] + (token >> 5), mask=mask, other=0)
            logits = tl.where(((words >> (token & 31)) & 1) != 0, logits, float("-inf"))
    return logits


@triton.jit
def _biased(logits, token, biases, recent, adjustments, position):
    """Add the biases that hold to tokens that come in whole tiles; each tile looks at its own biases alone."""
    groups: tl.constexpr = token.shape[0] // _TILE
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
            holds = holds & ((wanted < 0) | (wanted == tl.load(recent + ((position - back) & _MAX_FOLLOWED))))
        logits += tl.where(token == tl.where(holds, own, -1)[:, None], value[:, None], 0.0)
        at += 1
        own = tl.load(biases + at, mask=at < total, other=_NO_TOKEN)
        exists = own < first_token + _TILE
    return tl.reshape(logits, (groups * _TILE,))


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
def _penalised(logits, source, token):
    """Apply the penalties for tokens of the prompt, and for sampled ones."""
    repetition, presence, frequency = tl.load(source[5]), tl.load(source[6]), tl.load(source[7])
    counts = tl.load(source[8] + token, mask=token < source[2], other=0)
    repeated = tl.where(logits < 0, logits * repetition, logits * (1.0 / repetition))
    logits = tl.where(counts != 0, repeated, logits)
    times = counts >> 1
    return logits - frequency * times.to(tl.float32) - tl.where(times > 0, presence, 0.0)


@triton.jit
def _count(source, token):
    """Count a sampled token, and store its position."""
    if (source[1] & _COUNTED) != 0:
        place = source[8] + token
        before = tl.load(place).to(tl.int32)
        tl.store(place, tl.where(before < _MAX_COUNTED - 1, before + 2, before).to(tl.int16))
    if ((source[1] // _FOLLOWING) & _MAX_FOLLOWED) != 0:
        tl.store(source[11] + (tl.load(source[4]) & _MAX_FOLLOWED), token.to(tl.int32))


@triton.jit(do_not_specialize=["deferred"])
def _summarise_for_sampling(
    logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
    biases, recent, deferred, vocabulary, seeds, top_k, top_p,
    largest, mass, behind, tiles, leads, leaders,
):  # fmt: skip
    """Write each tile's largest score, the sum of ``exp(score - largest)``, and its number; grid ``(B, spans)``."""
    source, row, slot, row_temperature = _source(
        logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
        biases, recent, vocabulary,
    )  # fmt: skip
    if _is_served(source, deferred):
        span = tl.program_id(1)
        scores = _scores(source, span * _SPAN + tl.arange(0, _SPAN))
        scores = tl.reshape(scores, (_SPAN // _TILE, _TILE))
        peak = tl.max(scores, axis=1)
        # A tile that is -inf throughout would become NaN: -inf - -inf.
        shift = tl.where(peak > float("-inf"), peak, 0.0)
        tile = span * (_SPAN // _TILE) + tl.arange(0, _SPAN // _TILE)
        tl.store(largest + row * tiles + tile, peak, mask=tile < tiles)
        own_mass = tl.sum(tl.exp(scores - shift[:, None]), axis=1)
        tl.store(mass + row * tiles + tile, own_mass, mask=tile < tiles)
        if row_temperature != 0.0:
            seed, position = tl.load(seeds + row), tl.load(source[4])
            _, _, proposes = _filters(top_k, top_p, slot, vocabulary)
            number = log_exponentials_of_tiles(seed, position, tile, tl.where(proposes, _PROPOSALS, 0))
            tl.store(behind + row * tiles + tile, number, mask=tile < tiles)
            if proposes:
                place = (row * tl.num_programs(1) + span) * _PROPOSALS
                _lead(seed, position, tl.log(own_mass) + peak, tile, tiles, leads + place, leaders + place)


@triton.jit
def _lead(seed, position, masses, tile, tiles, leads, leaders):
    """Write which of a span's tiles gets furthest in the race for each proposal, and how far."""
    attempt = tl.arange(0, _PROPOSALS)
    reached = masses[None, :] - log_exponentials_of_tiles(seed, position, tile[None, :], attempt[:, None])
    furthest = tl.max(reached, axis=1)
    leader = tl.min(tl.where(reached >= furthest[:, None], tile[None, :], _NO_TOKEN), axis=1)
    tl.store(leads + attempt, furthest)
    tl.store(leaders + attempt, tl.minimum(leader, tiles - 1))  # of NaN none is the furthest


@triton.jit(do_not_specialize=["deferred"])
def _weigh_proposals(
    logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
    biases, recent, deferred, vocabulary, seeds, top_k, top_p,
    largest, mass, behind, tiles, leads, leaders, spans, proposed, reached, above,
    padded_tiles: tl.constexpr, padded_spans: tl.constexpr,
):  # fmt: skip
    """Write a row's proposals, their scores, and the mass of likelier tokens in each part; grid ``(B, parts)``."""
    source, row, slot, row_temperature = _source(
        logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
        biases, recent, vocabulary,
    )  # fmt: skip
    _, _, proposes = _filters(top_k, top_p, slot, vocabulary)
    if _is_served(source, deferred) & (row_temperature != 0.0) & proposes:
        place = row * spans * _PROPOSALS
        race = (tl.load(seeds + row), tl.load(source[4]))
        tokens, scores = _proposals(source, race, leads + place, leaders + place, spans, tiles, padded_spans)
        attempt, part = tl.arange(0, _PROPOSALS), tl.program_id(1)
        if part == 0:
            tl.store(proposed + row * _PROPOSALS + attempt, tokens)
            tl.store(reached + row * _PROPOSALS + attempt, scores)
        tile = tl.arange(0, padded_tiles)
        peak = tl.max(tl.load(largest + row * tiles + tile, mask=tile < tiles, other=float("-inf")), axis=0)
        size = tl.cdiv(tl.cdiv(vocabulary, _PARTS), _PART_CHUNK) * _PART_CHUNK
        masses = tl.zeros((_PROPOSALS, _PART_CHUNK), tl.float32)
        for start in range(part * size, tl.minimum((part + 1) * size, vocabulary), _PART_CHUNK):
            others = _scores(source, start + tl.arange(0, _PART_CHUNK))
            masses += tl.where(others[None, :] > scores[:, None], tl.exp(others - peak)[None, :], 0.0)
        tl.store(above + (row * _PARTS + part) * _PROPOSALS + attempt, tl.sum(masses, axis=1))


@triton.jit
def _proposals(source, race, leads, leaders, spans, tiles, padded_spans: tl.constexpr):
    """Return the tokens that win each of a row's races for a proposal, and their scores."""
    attempt, span, lane = tl.arange(0, _PROPOSALS), tl.arange(0, padded_spans), tl.arange(0, _TILE)
    place = span[None, :] * _PROPOSALS + attempt[:, None]
    exists = span[None, :] < spans
    lead = tl.load(leads + place, mask=exists, other=float("-inf"))
    leader = tl.load(leaders + place, mask=exists, other=0)
    tile = tl.min(tl.where(lead >= tl.max(lead, axis=1)[:, None], leader, tiles - 1), axis=1)
    token = tile[:, None] * _TILE + lane[None, :]
    scores = tl.reshape(_scores(source, tl.reshape(token, (_PROPOSALS * _TILE,))), (_PROPOSALS, _TILE))
    lead = scores - log_exponentials_of_tokens(race[0], race[1], token, attempt[:, None])
    winner = tl.min(tl.where(lead >= tl.max(lead, axis=1)[:, None], token, _NO_TOKEN), axis=1)
    return winner, tl.max(tl.where(token == winner[:, None], scores, float("-inf")), axis=1)


@triton.jit(do_not_specialize=["deferred"])
def _sample_rows(
    logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
    biases, recent, deferred, vocabulary, seeds, top_k, top_p,
    largest, mass, behind, tiles, proposed, reached, above, min_p,
    found, candidates, candidate_scores, sampled, not_a_token, padded_tiles: tl.constexpr,
):  # fmt: skip
    """Sample one row's token and count it; grid ``(B,)``."""
    source, row, slot, row_temperature = _source(
        logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
        biases, recent, vocabulary,
    )  # fmt: skip
    tile = tl.arange(0, padded_tiles)
    tops = tl.load(largest + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    peak = tl.max(tops, axis=0)
    token = not_a_token
    usable = (row_temperature == 0.0) | ((peak > float("-inf")) & (peak < float("inf")))
    if _is_served(source, deferred) & usable:
        found += row * tiles
        behind += row * tiles
        k, p, proposes = _filters(top_k, top_p, slot, vocabulary)
        m = tl.load(min_p + slot)
        attempt = tl.where(proposes, _PROPOSALS, 0)
        race = (tl.load(seeds + row), tl.load(positions + row), peak, behind, attempt)
        # Each tile's mass is relative to its own largest score; from here on all are relative to the row's.
        masses = tl.load(mass + row * tiles + tile, mask=tile < tiles, other=0.0) * tl.exp(tops - peak)
        token = -1
        if row_temperature == 0.0:
            token = _first_of_largest(source, tops, peak, padded_tiles)
            if peak == float("inf"):
                token = _first_nan(source, token)
        elif (k > 0) | (p < 1.0) | (m > 0.0):
            floor = tl.where(m > 0.0, peak + tl.log(m), peak - _REACH)
            total = tl.sum(masses, axis=0)
            # Mostly a proposal is kept, or all candidates fit into one block; else the whole row is passed over.
            if proposes:
                places = (proposed + row * _PROPOSALS, reached + row * _PROPOSALS, above + row * _PARTS * _PROPOSALS)
                token, bound = _first_kept(places, p * total, floor)
            else:
                bound = _bound(tops, tiles, peak, floor, k)
                scratch = (found, candidates + row * _CANDIDATES, candidate_scores + row * _CANDIDATES)
                token = _sample_of_few(source, scratch, tops, bound, race, floor, k, p, padded_tiles)
            if token < 0:
                smallest = _smallest_kept(source, peak, total, bound, floor, k, p)
                token = _sample_of_many(source, found, tops, race, smallest, padded_tiles)
        else:
            leads = tl.log(masses) - tl.load(behind + tile, mask=tile < tiles, other=0.0)
            token = _sample_of_all(source, race, leads, padded_tiles)
        _count(source, token)
    tl.store(sampled + row, token.to(tl.int64))


@triton.jit
def _first_of_largest(source, tops, peak, padded_tiles: tl.constexpr):
    """Return the first token of all that score ``peak``."""
    tile = tl.min(tl.where(tops >= peak, tl.arange(0, padded_tiles), padded_tiles), axis=0)
    lane = tl.arange(0, _TILE)
    scores = _scores(source, tile * _TILE + lane)
    return tile * _TILE + tl.min(tl.where(scores >= peak, lane, _TILE), axis=0)


@triton.jit
def _first_nan(source, otherwise):
    """Return the first token whose logit is NaN, which counts as the largest; ``otherwise`` if there is none."""
    vocabulary = source[2]
    first, lane = vocabulary, tl.arange(0, _CHUNK)
    for start in range(0, vocabulary, _CHUNK):
        token = start + lane
        logits = _logits(source, token)
        first = tl.minimum(first, tl.min(tl.where(logits != logits, token, vocabulary), axis=0))
    return tl.where(first < vocabulary, first, otherwise)


@triton.jit
def _first_kept(places, needed, floor):
    """Return the first proposal that is kept, or -1, and a score that all tokens of the nucleus reach."""
    proposed, reached, above = places
    attempt, part = tl.arange(0, _PROPOSALS), tl.arange(0, _PARTS)
    scores = tl.load(reached + attempt)
    likelier = tl.sum(tl.load(above + part[None, :] * _PROPOSALS + attempt[:, None]), axis=1)
    inside = likelier < needed
    first = tl.min(tl.where(inside & (scores >= floor), attempt, _PROPOSALS), axis=0)
    token = tl.load(proposed + first, mask=first < _PROPOSALS, other=-1)
    return token, tl.max(tl.where(inside, float("-inf"), scores), axis=0)


# ---- the race


@triton.jit
def _sample_of_all(source, race, leads, padded_tiles: tl.constexpr):
    """Return the token that wins in the winning tile, of a row that keeps all of them."""
    # ``race`` is the row's seed, its position, its largest score, where the numbers of its tiles are, and how many
    # races were before it; ``leads`` is how far each tile gets.
    tile = tl.min(tl.where(leads >= tl.max(leads, axis=0), tl.arange(0, padded_tiles), padded_tiles - 1), axis=0)
    token = tile * _TILE + tl.arange(0, _TILE)
    return _winner(race, token, _scores(source, token))


@triton.jit
def _winner(race, token, scores):
    """Return the token that gets furthest, of those whose scores are not -inf."""
    leads = scores - race[2] - log_exponentials_of_tokens(race[0], race[1], token, race[4])
    return tl.min(tl.where(leads >= tl.max(leads, axis=0), token, _NO_TOKEN), axis=0)


@triton.jit
def _sample_of_many(source, found, tops, race, smallest, padded_tiles: tl.constexpr):
    """Return the token that wins among those from ``smallest`` on, in the tile that wins with these."""
    peak, groups = race[2], tl.arange(0, _CHUNK // _TILE)
    count = _list_tiles(found, tops >= smallest, padded_tiles)
    # Each group of lanes has its own best tile: warps need not wait for each other in the loop.
    winners = tl.zeros((_CHUNK // _TILE,), tl.int32)
    best = tl.full((_CHUNK // _TILE,), float("-inf"), tl.float32)
    for first in range(0, count, _CHUNK // _TILE):
        scores = _scores(source, _listed_tokens(source, found, first, count))
        weights = tl.where(scores >= smallest, tl.exp(scores - peak), 0.0)
        masses = tl.sum(tl.reshape(weights, (_CHUNK // _TILE, _TILE)), axis=1)
        tile = tl.load(found + first + groups, mask=first + groups < count, other=0)
        leads = tl.log(masses) - tl.load(race[3] + tile)
        winners = tl.where(leads > best, tile, winners)
        best = tl.maximum(best, leads)
    winner = tl.min(tl.where(best >= tl.max(best, axis=0), winners, _NO_TOKEN), axis=0)
    token = winner * _TILE + tl.arange(0, _TILE)
    scores = _scores(source, token)
    return _winner(race, token, tl.where(scores >= smallest, scores, float("-inf")))


@triton.jit
def _list_tiles(found, selected, padded_tiles: tl.constexpr):
    """Write the numbers of the selected tiles, in order; return how many they are."""
    entries = tl.cumsum(selected.to(tl.int32), axis=0) - 1
    tl.debug_barrier()  # an earlier list has been read
    tl.store(found + entries, tl.arange(0, padded_tiles), mask=selected)
    tl.debug_barrier()  # written before other threads read it
    return tl.sum(selected.to(tl.int32), axis=0)


@triton.jit
def _listed_tokens(source, found, first, count):
    """Return a chunk of tokens of the tiles that are listed from ``first`` on; none stands after the last of them."""
    lane = tl.arange(0, _CHUNK)
    entry = first + lane // _TILE
    tile = tl.load(found + entry, mask=entry < count, other=0)
    return tl.where(entry < count, tile * _TILE + lane % _TILE, source[2])


# ---- if few tokens can be kept


@triton.jit
def _bound(tops, tiles, peak, floor, k):
    """Return a score that all tokens reach that can be kept, if they are few."""
    # At least as many tiles as top-k keeps tokens reach it, so the k-th largest score does.
    bound = floor
    if k > 0:
        low, high = peak - _REACH, peak
        if tiles >= k:
            low = tl.maximum(low, tl.min(tl.where(tops > float("-inf"), tops, peak), axis=0))
        reach = tl.sum((tops >= low).to(tl.int32), axis=0)
        middle = low + (high - low) * 0.5
        # Bisect the tiles' largest scores, which are in registers, until at most a quarter too many tiles are left.
        while (reach > k + k // 4) & (middle > low) & (middle < high):
            above = tl.sum((tops >= middle).to(tl.int32), axis=0)
            enough = above >= k
            reach = tl.where(enough, above, reach)
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
            middle = low + (high - low) * 0.5
        bound = low
    return bound


@triton.jit
def _sample_of_few(
    source, scratch, tops, bound, race, floor, k, p, padded_tiles: tl.constexpr,
):  # fmt: skip
    """Return the sampled token, or -1 if the tokens that reach ``bound`` are too many."""
    candidates, candidate_scores, peak = scratch[1], scratch[2], race[2]
    token = -1
    size = _gather(source, scratch, tops, bound, padded_tiles)
    if size <= _CANDIDATES:
        lane = tl.arange(0, _CANDIDATES)
        scores = tl.load(candidate_scores + lane, mask=lane < size, other=float("-inf"))
        weights = tl.exp(scores - peak)
        rank, above = _ranks(scores, candidate_scores, size, peak)
        within = (rank < k) | (k <= 0)
        needed = tl.where(p < 1.0, p * tl.sum(tl.where(within, weights, 0.0), axis=0), float("inf"))
        kept = within & (scores >= floor) & ((above < needed) | (rank == 0))
        tokens = tl.load(candidates + lane, mask=lane < size, other=_NO_TOKEN)
        weights = tl.where(kept, weights, 0.0)
        masses = _masses_of_tiles(tokens, weights, candidates, candidate_scores, size)
        leads = tl.log(masses) - tl.load(race[3] + tokens // _TILE, mask=lane < size, other=0.0)
        of_winner = kept & (leads >= tl.max(leads, axis=0))
        token = _winner(race, tokens, tl.where(of_winner, scores, float("-inf")))
    return token


@triton.jit
def _masses_of_tiles(tokens, weights, candidates, candidate_weights, size):
    """Return, for each candidate, the total weight of the candidates in its tile; their scores are overwritten."""
    tl.debug_barrier()  # the scores have been read
    tl.store(candidate_weights + tl.arange(0, _CANDIDATES), weights)
    tl.debug_barrier()
    masses = tl.zeros((_CANDIDATES,), tl.float32)
    for first in range(0, size, _TILE):
        place = first + tl.arange(0, _TILE)
        other = tl.load(candidates + place, mask=place < size, other=_NO_TOKEN)
        weight = tl.load(candidate_weights + place, mask=place < size, other=0.0)
        beside = (other // _TILE)[None, :] == (tokens // _TILE)[:, None]
        masses += tl.sum(tl.where(beside, weight[None, :], 0.0), axis=1)
    return masses


@triton.jit
def _gather(source, scratch, tops, bound, padded_tiles: tl.constexpr):
    """Write the tokens that score at least ``bound``, in order; return how many there are, or more than fit."""
    found, candidates, candidate_scores = scratch
    selected = tops >= bound
    size = tl.sum(selected.to(tl.int32), axis=0)
    if size <= _CANDIDATES:
        count = _list_tiles(found, selected, padded_tiles)
        size = 0
        for first in range(0, count, _CHUNK // _TILE):
            token = _listed_tokens(source, found, first, count)
            scores = _scores(source, token)
            kept = scores >= bound
            offs = size + tl.cumsum(kept.to(tl.int32), axis=0) - 1
            tl.store(candidates + offs, token, mask=kept & (offs < _CANDIDATES))
            tl.store(candidate_scores + offs, scores, mask=kept & (offs < _CANDIDATES))
            size += tl.sum(kept.to(tl.int32), axis=0)
        tl.debug_barrier()  # likewise
    return size


@triton.jit
def _ranks(scores, candidate_scores, size, peak):
    """Return how many candidates score higher than each of ``scores`` ``[C]``, and their mass."""
    # Every candidate is compared with every other: so few need no sorting, and equal scores get equal ranks.
    rank = tl.zeros((_CANDIDATES,), tl.int32)
    above = tl.zeros((_CANDIDATES,), tl.float32)
    for first in range(0, size, _TILE):
        place = first + tl.arange(0, _TILE)
        other = tl.load(candidate_scores + place, mask=place < size, other=float("-inf"))
        higher = other[None, :] > scores[:, None]
        rank += tl.sum(higher.to(tl.int32), axis=1)
        above += tl.sum(tl.where(higher, tl.exp(other - peak)[None, :], 0.0), axis=1)
    return rank, above


# ---- if many can: passes over the row


@triton.jit
def _smallest_kept(source, peak, total, bound, floor, k, p):
    """Return the score from which on top-k, top-p and min-p keep tokens."""
    smallest = tl.maximum(peak - _REACH, bound)
    if k > 0:
        smallest = _search(source, smallest, peak, k.to(tl.float32), False)
        if p < 1.0:
            total = _mass(source, smallest, peak)
    if p < 1.0:
        # All below this have less mass together than top-p may leave out.
        low = peak + tl.log(0.5 * (1.0 - p) * total / source[2])
        smallest = _search(source, tl.maximum(smallest, low), peak, p * total, True)
    return tl.maximum(smallest, floor)


@triton.jit
def _mass(source, smallest, peak):
    """Return the mass of the tokens from ``smallest`` on."""
    lane = tl.arange(0, _CHUNK)
    masses = tl.zeros((_CHUNK,), tl.float32)
    for start in range(0, source[2], _CHUNK):
        scores = _scores(source, start + lane)
        masses += tl.where(scores >= smallest, tl.exp(scores - peak), 0.0)
    return tl.sum(masses, axis=0)


@triton.jit
def _search(source, low, peak, needed, by_mass: tl.constexpr):
    """Return a score that separates the same tokens as the largest which, with all larger ones, has ``needed``."""
    # That is a mass, or a number of tokens. Each pass over the row quarters the interval from ``low`` to the largest
    # score, until one score is left in it.
    high = peak + tl.abs(peak) * 1e-6 + 1e-30
    lane = tl.arange(0, _CHUNK)
    several = True
    while several:
        step = (high - low) * 0.25
        first, second, third = low + step, low + 2 * step, low + 3 * step
        sums_first = tl.zeros((_CHUNK,), tl.float32)
        sums_second = tl.zeros((_CHUNK,), tl.float32)
        sums_third = tl.zeros((_CHUNK,), tl.float32)
        least = tl.full((_CHUNK,), float("inf"), tl.float32)
        most = tl.full((_CHUNK,), float("-inf"), tl.float32)
        for start in range(0, source[2], _CHUNK):
            scores = _scores(source, start + lane)
            weights = tl.full((_CHUNK,), 1.0, tl.float32)
            if by_mass:
                weights = tl.exp(scores - peak)
            sums_first += tl.where(scores >= first, weights, 0.0)
            sums_second += tl.where(scores >= second, weights, 0.0)
            sums_third += tl.where(scores >= third, weights, 0.0)
            inside = (scores >= low) & (scores < high)
            least = tl.minimum(least, tl.where(inside, scores, float("inf")))
            most = tl.maximum(most, tl.where(inside, scores, float("-inf")))
        # Scores repeat: the search ends when all that are left in the interval are equal, not when it is empty.
        bottom, top = tl.min(least, axis=0), tl.max(most, axis=0)
        several = bottom < top
        if several:
            at_first = tl.sum(sums_first, axis=0) >= needed
            at_second = tl.sum(sums_second, axis=0) >= needed
            at_third = tl.sum(sums_third, axis=0) >= needed
            high = tl.where(at_third, high, tl.where(at_second, third, tl.where(at_first, second, first)))
            low = tl.where(at_third, third, tl.where(at_second, second, tl.where(at_first, first, low)))
            low = tl.maximum(low, bottom)
    return low
