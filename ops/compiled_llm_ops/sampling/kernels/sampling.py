"""The CUDA kernels of ``sampling``, in Triton."""

# The first kernel reads the logits once, with the whole device, and writes the largest score of each tile of
# neighbouring tokens, its mass, and the logarithm of its random number. The last samples, one program a row. All branch
# on the row's settings on the device, so that neither the host nor a captured graph has to know them. A tile is drawn
# first and then a token of it (see ``race``), so a row without filters reads one tile.
# Top-k keeps no token that scores less than the k-th largest tile. The second kernel lists those that score as much,
# with the whole device, mostly little more than k; for a large k it guesses a score from a sample, one token a tile.
# The last kernel searches the list for the scores at which top-k and top-p cut, and its tokens race each for itself.
# Where the guess was wrong, or there is no room for the list, it searches the row.
# A nucleus without top-k may hold any number of tokens, and to find where it ends takes many passes over the row.
# Whether one token is in it takes one: the tokens that are likelier have too little mass to fill it. So some tokens are
# drawn from the whole row, the second kernel weighs what is likelier than each, and the first one in the nucleus is
# taken, as likely as if it had been drawn from there.
# Shapes: B rows, V vocabulary, X entries of the tables of settings.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.contracts.sampling import PROPOSALS, TILE
from compiled_llm_ops.sampling.kernels.candidates import (
    LISTS,
    PART_CHUNK,
    PART_WARPS,
    PARTS,
    REACH,
    ROOM,
    Lists,
    block_of,
    bound_of,
    extent_of,
    list_candidates,
    list_tiles,
    listed_tokens,
)
from compiled_llm_ops.sampling.kernels.cut import LIST_BLOCK, ROW_BLOCK, cut_of
from compiled_llm_ops.sampling.kernels.race import log_exponentials_of_tiles, log_exponentials_of_tokens
from compiled_llm_ops.sampling.kernels.scores import count_token, filters_of, is_served, logits_of, scores_of, source_of
from compiled_llm_ops.sampling.sampling import SampleTokens

_TILE = tl.constexpr(TILE)
_SPAN = tl.constexpr(2048)
_CHUNK = tl.constexpr(4096)
_PROPOSALS = tl.constexpr(PROPOSALS)
_NO_TOKEN = tl.constexpr(2**31 - 1)
_WIDE_WARPS = 4
# What rows without logit adjustments need; without a bound, others would leave room for fewer blocks of them.
_WIDE_REGISTERS = 48
_PART_REGISTERS = 80  # leaves room for three blocks
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
    sample = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    behind = torch.empty(rows, tiles, dtype=torch.float32, device=device)
    parts = PARTS.value
    found = torch.empty(rows, parts, triton.cdiv(tiles, parts), dtype=torch.int32, device=device)
    candidates = torch.empty(rows, LISTS.value, ROOM.value, dtype=torch.int32, device=device)
    candidate_scores = torch.empty(rows, LISTS.value, ROOM.value, dtype=torch.float32, device=device)
    sizes = torch.empty(rows, LISTS.value, dtype=torch.int32, device=device)
    bounds = torch.empty(rows, dtype=torch.float32, device=device)
    before, width = (None, 0) if args.before is None else (args.before.contiguous(), args.before.shape[1])
    tables = (
        args.slots, args.positions, args.temperature, args.adjustments, args.repetition_penalty, args.presence_penalty,
        args.frequency_penalty, args.counts, args.allowed, args.biases, args.recent, before, width,
    )  # fmt: skip
    spans = triton.cdiv(vocabulary, _SPAN.value)
    leads = torch.empty(rows, spans, PROPOSALS, dtype=torch.float32, device=device)
    leaders = torch.empty(rows, spans, PROPOSALS, dtype=torch.int32, device=device)
    proposed = torch.empty(rows, PROPOSALS, dtype=torch.int32, device=device)
    reached = torch.empty(rows, PROPOSALS, dtype=torch.float32, device=device)
    above = torch.empty(rows, parts, PROPOSALS, dtype=torch.float32, device=device)
    part_leads = torch.empty(rows, parts, dtype=torch.float32, device=device)
    part_leaders = torch.empty(rows, parts, dtype=torch.int32, device=device)
    shared = (
        logits,
        logits.stride(0),
        *tables,
        int(args.deferred),
        vocabulary,
        args.seeds,
        args.top_k,
        args.top_p,
        args.min_p,
        largest,
        mass,
        sample,
        behind,
        tiles,
    )
    wide = {"num_warps": _WIDE_WARPS, "maxnreg": _WIDE_REGISTERS}
    yield _Launch(_summarise_for_sampling, (rows, spans), (*shared, leads, leaders), wide)
    padded = {"padded_tiles": triton.next_power_of_2(tiles)}
    examined = (
        proposed, reached, above, found, candidates, candidate_scores, sizes, bounds, part_leads, part_leaders,
    )  # fmt: skip
    several = {
        **padded,
        "padded_spans": triton.next_power_of_2(spans),
        "num_warps": PART_WARPS,
        "maxnreg": _PART_REGISTERS,
    }
    yield _Launch(_examine_rows, (rows, parts), (*shared, leads, leaders, spans, *examined), several)
    narrow = {**padded, "num_warps": _ROW_WARPS}
    yield _Launch(_sample_rows, (rows,), (*shared, *examined, sampled, not_a_token), narrow)


class Race(NamedTuple):
    """A race among a row's tokens."""

    seed: tl.tensor
    position: tl.tensor
    largest: tl.tensor  # the row's largest score
    behind: tl.tensor  # where the numbers of its tiles are
    attempt: tl.tensor  # how many races were before it


@triton.jit(do_not_specialize=["deferred", "width"])
def _summarise_for_sampling(
    logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
    biases, recent, before, width, deferred, vocabulary, seeds, top_k, top_p, min_p,
    largest, mass, sample, behind, tiles, leads, leaders,
):  # fmt: skip
    """Write each tile's largest score, the sum of ``exp(score - largest)``, and its number; grid ``(B, spans)``."""
    source, row, slot, row_temperature = source_of(
        logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
        biases, recent, before, width, vocabulary,
    )  # fmt: skip
    if is_served(source, deferred):
        span = tl.program_id(1)
        scores = scores_of(source, span * _SPAN + tl.arange(0, _SPAN), span * _SPAN)
        scores = tl.reshape(scores, (_SPAN // _TILE, _TILE))
        peak = tl.max(scores, axis=1)
        # A tile that is -inf throughout would become NaN: -inf - -inf.
        shift = tl.where(peak > float("-inf"), peak, 0.0)
        tile = span * (_SPAN // _TILE) + tl.arange(0, _SPAN // _TILE)
        tl.store(largest + row * tiles + tile, peak, mask=tile < tiles)
        own_mass = tl.sum(tl.exp(scores - shift[:, None]), axis=1)
        tl.store(mass + row * tiles + tile, own_mass, mask=tile < tiles)
        k, _, _, proposes = filters_of(top_k, top_p, min_p, slot, vocabulary)
        if k > 0:
            own_sample = tl.sum(tl.where(tl.arange(0, _TILE)[None, :] == 0, scores, 0.0), axis=1)
            tl.store(sample + row * tiles + tile, own_sample, mask=tile < tiles)
        elif row_temperature != 0.0:
            seed, position = tl.load(seeds + row), tl.load(source.position)
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


# ---- what filters ask of the whole row


@triton.jit(do_not_specialize=["deferred", "width"])
def _examine_rows(
    logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
    biases, recent, before, width, deferred, vocabulary, seeds, top_k, top_p, min_p,
    largest, mass, sample, behind, tiles, leads, leaders, spans,
    proposed, reached, above, found, candidates, candidate_scores, sizes, bounds, part_leads, part_leaders,
    padded_tiles: tl.constexpr, padded_spans: tl.constexpr,
):  # fmt: skip
    """Weigh a row's proposals, or list its candidates, one part of the row; grid ``(B, parts)``."""
    source, row, slot, row_temperature = source_of(
        logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
        biases, recent, before, width, vocabulary,
    )  # fmt: skip
    k, _, m, proposes = filters_of(top_k, top_p, min_p, slot, vocabulary)
    if is_served(source, deferred) & (row_temperature != 0.0) & ((k > 0) | proposes | (m > 0.0)):
        tile, part = tl.arange(0, padded_tiles), tl.program_id(1)
        tops = tl.load(largest + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        peak = tl.max(tops, axis=0)
        usable = (peak > float("-inf")) & (peak < float("inf"))
        race = Race(tl.load(seeds + row), tl.load(source.position), peak, behind + row * tiles, 0)
        if usable & proposes:
            place, attempt = row * spans * _PROPOSALS, tl.arange(0, _PROPOSALS)
            tokens, scores = _proposals(source, race, leads + place, leaders + place, spans, tiles, padded_spans)
            if part == 0:
                tl.store(proposed + row * _PROPOSALS + attempt, tokens)
                tl.store(reached + row * _PROPOSALS + attempt, scores)
            _weigh(source, scores, peak, above + row * PARTS * _PROPOSALS)
        elif usable:
            smallest = peak + tl.log(m)
            if k > 0:
                values, needed = tops, k
                if 4 * k > 3 * tiles:
                    values = tl.load(sample + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
                    expected = k.to(tl.float32) / _TILE
                    needed = (expected + 4.0 * tl.sqrt(expected)).to(tl.int32) + 4
                smallest = bound_of(values, needed, peak)
            own = row * PARTS + part
            found += own * tl.cdiv(tiles, PARTS)
            count = list_tiles(found, tops >= smallest, part, PARTS, padded_tiles)
            if k > 0:
                place = own * (LISTS // PARTS)
                lists = Lists(candidates + place * ROOM, candidate_scores + place * ROOM, sizes + place)
                list_candidates(source, found, count, smallest, lists)
                tl.store(bounds + row, smallest)  # as each part does
            else:
                lead, leader = _leading_tile(source, found, count, smallest, race, PART_CHUNK)
                tl.store(part_leads + own, lead)
                tl.store(part_leaders + own, leader)


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
    scores = tl.reshape(scores_of(source, tl.reshape(token, (_PROPOSALS * _TILE,))), (_PROPOSALS, _TILE))
    lead = scores - log_exponentials_of_tokens(race.seed, race.position, token, attempt[:, None])
    winner = tl.min(tl.where(lead >= tl.max(lead, axis=1)[:, None], token, _NO_TOKEN), axis=1)
    return winner, tl.max(tl.where(token == winner[:, None], scores, float("-inf")), axis=1)


@triton.jit
def _weigh(source, scores, peak, above):
    """Write the mass of this part's tokens that are likelier than each of ``scores``."""
    part, vocabulary = tl.program_id(1), source.vocabulary
    size = tl.cdiv(tl.cdiv(vocabulary, PARTS), PART_CHUNK) * PART_CHUNK
    masses = tl.zeros((_PROPOSALS, PART_CHUNK), tl.float32)
    for start in range(part * size, tl.minimum((part + 1) * size, vocabulary), PART_CHUNK):
        others = scores_of(source, start + tl.arange(0, PART_CHUNK), start)
        masses += tl.where(others[None, :] > scores[:, None], tl.exp(others - peak)[None, :], 0.0)
    tl.store(above + part * _PROPOSALS + tl.arange(0, _PROPOSALS), tl.sum(masses, axis=1))


# ---- the choice


@triton.jit(do_not_specialize=["deferred", "width"])
def _sample_rows(
    logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
    biases, recent, before, width, deferred, vocabulary, seeds, top_k, top_p, min_p,
    largest, mass, sample, behind, tiles,
    proposed, reached, above, found, candidates, candidate_scores, sizes, bounds, part_leads, part_leaders,
    sampled, not_a_token, padded_tiles: tl.constexpr,
):  # fmt: skip
    """Sample one row's token and count it; grid ``(B,)``."""
    source, row, slot, row_temperature = source_of(
        logits, stride, slots, positions, temperature, adjustments, repetition, presence, frequency, counts, allowed,
        biases, recent, before, width, vocabulary,
    )  # fmt: skip
    tile = tl.arange(0, padded_tiles)
    tops = tl.load(largest + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    peak = tl.max(tops, axis=0)
    token = not_a_token
    usable = (row_temperature == 0.0) | ((peak > float("-inf")) & (peak < float("inf")))
    if is_served(source, deferred) & usable:
        k, p, m, proposes = filters_of(top_k, top_p, min_p, slot, vocabulary)
        attempt = tl.where(proposes, _PROPOSALS, 0)
        race = Race(tl.load(seeds + row), tl.load(positions + row), peak, behind + row * tiles, attempt)
        # Each tile's mass is relative to its own largest score; from here on all are relative to the row's.
        masses = tl.load(mass + row * tiles + tile, mask=tile < tiles, other=0.0) * tl.exp(tops - peak)
        floor = tl.where(m > 0.0, peak + tl.log(m), peak - REACH)
        token = -1
        if row_temperature == 0.0:
            token = _first_of_largest(source, tops, peak, padded_tiles)
            if peak == float("inf"):
                token = _first_nan(source, token)
        elif (k > 0) | (p < 1.0):
            total, bound = tl.sum(masses, axis=0), peak - REACH
            place = row * LISTS
            lists = Lists(candidates + place * ROOM, candidate_scores + place * ROOM, sizes + place)
            extent, listed = vocabulary, k > 0
            if proposes:
                token, bound = _first_kept(
                    proposed + row * _PROPOSALS, reached + row * _PROPOSALS, above + row * PARTS * _PROPOSALS,
                    p * total, floor, bound,
                )  # fmt: skip
            else:
                extent, listed, bound = extent_of(sizes + place, tl.load(bounds + row), k, peak, vocabulary)
            if listed:
                smallest = tl.maximum(floor, cut_of(source, lists, extent, bound, peak, total, k, p, True))
                token = _race_of_tokens(source, lists, extent, race, smallest, True, LIST_BLOCK)
            elif token < 0:
                smallest = tl.maximum(floor, cut_of(source, lists, extent, bound, peak, total, k, p, False))
                if k > 0:
                    token = _race_of_tokens(source, lists, extent, race, smallest, False, ROW_BLOCK)
                else:
                    found += row * PARTS * tl.cdiv(tiles, PARTS)
                    count = list_tiles(found, tops >= smallest, 0, 1, padded_tiles)
                    _, leader = _leading_tile(source, found, count, smallest, race, _CHUNK)
                    token = _winner_of_tile(source, race, leader, smallest)
        elif m > 0.0:
            part = row * PARTS + tl.arange(0, PARTS)
            _, leader = _first_of_best(tl.load(part_leads + part), tl.load(part_leaders + part))
            token = _winner_of_tile(source, race, leader, floor)
        else:
            leads = tl.log(masses) - tl.load(race.behind + tile, mask=tile < tiles, other=0.0)
            leader = tl.min(tl.where(leads >= tl.max(leads, axis=0), tile, padded_tiles - 1), axis=0)
            token = _winner_of_tile(source, race, leader, float("-inf"))
        if before is None:
            count_token(source, token)
    tl.store(sampled + row, token.to(tl.int64))


@triton.jit
def _first_of_largest(source, tops, peak, padded_tiles: tl.constexpr):
    """Return the first token of all that score ``peak``."""
    tile = tl.min(tl.where(tops >= peak, tl.arange(0, padded_tiles), padded_tiles), axis=0)
    lane = tl.arange(0, _TILE)
    scores = scores_of(source, tile * _TILE + lane, tile * _TILE)
    return tile * _TILE + tl.min(tl.where(scores >= peak, lane, _TILE), axis=0)


@triton.jit
def _first_nan(source, otherwise):
    """Return the first token whose logit is NaN, which counts as the largest; ``otherwise`` if there is none."""
    vocabulary = source.vocabulary
    first, lane = vocabulary, tl.arange(0, _CHUNK)
    for start in range(0, vocabulary, _CHUNK):
        token = start + lane
        logits = logits_of(source, token, start)
        first = tl.minimum(first, tl.min(tl.where(logits != logits, token, vocabulary), axis=0))
    return tl.where(first < vocabulary, first, otherwise)


@triton.jit
def _first_kept(proposed, reached, above, needed, floor, bound):
    """Return the first proposal that is kept, or -1, and a score that the whole nucleus reaches, from ``bound`` on."""
    attempt, part = tl.arange(0, _PROPOSALS), tl.arange(0, PARTS)
    scores = tl.load(reached + attempt)
    likelier = tl.sum(tl.load(above + part[None, :] * _PROPOSALS + attempt[:, None]), axis=1)
    inside = likelier < needed
    first = tl.min(tl.where(inside & (scores >= floor), attempt, _PROPOSALS), axis=0)
    token = tl.load(proposed + first, mask=first < _PROPOSALS, other=-1)
    return token, tl.max(tl.where(inside, bound, tl.maximum(scores, bound)), axis=0)


# ---- races


@triton.jit
def _leading_tile(source, found, count, smallest, race, chunk: tl.constexpr):
    """Return how far the tokens from ``smallest`` on get in the race of ``count`` tiles, and the tile that leads."""
    groups: tl.constexpr = chunk // _TILE
    group = tl.arange(0, groups)
    leaders = tl.full((groups,), _NO_TOKEN, tl.int32)
    best = tl.full((groups,), float("-inf"), tl.float32)
    for first in range(0, count, groups):
        scores = scores_of(source, listed_tokens(source, found, first, count, chunk))
        weights = tl.where(scores >= smallest, tl.exp(scores - race.largest), 0.0)
        masses = tl.sum(tl.reshape(weights, (groups, _TILE)), axis=1)
        tile = tl.load(found + first + group, mask=first + group < count, other=0)
        leads = tl.log(masses) - tl.load(race.behind + tile)
        leaders = tl.where(leads > best, tile, leaders)
        best = tl.maximum(best, leads)
    return _first_of_best(best, leaders)


@triton.jit
def _first_of_best(leads, leaders):
    """Return the largest of ``leads``, and the first leader that gets as far."""
    best = tl.max(leads, axis=0)
    return best, tl.min(tl.where(leads >= best, leaders, _NO_TOKEN), axis=0)


@triton.jit
def _winner_of_tile(source, race, tile, smallest):
    """Return the token that gets furthest, of those of a tile from ``smallest`` on."""
    token = tile * _TILE + tl.arange(0, _TILE)
    scores = scores_of(source, token, tile * _TILE)
    leads = scores - race.largest - log_exponentials_of_tokens(race.seed, race.position, token, race.attempt)
    _, winner = _first_of_best(tl.where(scores >= smallest, leads, float("-inf")), token)
    return winner


@triton.jit
def _race_of_tokens(source, lists, extent, race, smallest, listed: tl.constexpr, block: tl.constexpr):
    """Return the token that gets furthest, of those from ``smallest`` on, which race each for itself."""
    winners = tl.full((block,), _NO_TOKEN, tl.int32)
    best = tl.full((block,), float("-inf"), tl.float32)
    for first in range(0, extent, block):
        token, scores = block_of(source, lists, first, listed, block)
        leads = scores - race.largest - log_exponentials_of_tokens(race.seed, race.position, token, race.attempt)
        leads = tl.where(scores >= smallest, leads, float("-inf"))
        winners = tl.where(leads > best, token, winners)
        best = tl.maximum(best, leads)
    _, winner = _first_of_best(best, winners)
    return winner
