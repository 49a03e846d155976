"""The tokens that top-k can keep, which the whole device lists, a part of a row at a time."""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from compiled_llm_ops.contracts.sampling import TILE
from compiled_llm_ops.sampling.kernels.scores import scores_of

_TILE = tl.constexpr(TILE)
PARTS = tl.constexpr(8)  # of a row, which are examined apart: as many whatever the batch is, so sums stay the same
PART_CHUNK = tl.constexpr(1024)
PART_WARPS = 8
_WARPS, _LANES = tl.constexpr(PART_WARPS), tl.constexpr(32)
LISTS = tl.constexpr(PARTS.value * PART_WARPS)  # of a row's candidates
ROOM = tl.constexpr(256)  # for the candidates of a list
# exp(-104) is 0 in float32: a token whose score is further below the largest is never drawn.
REACH = tl.constexpr(104.0)


class Lists(NamedTuple):
    """Where a row's lists of candidates begin, or a part's."""

    tokens: tl.tensor  # ``[..., ROOM]`` int32
    scores: tl.tensor  # ``[..., ROOM]`` float32
    sizes: tl.tensor  # ``[...]`` int32, how many a list has, or more than ROOM if they do not fit


@triton.jit
def bound_of(values, needed, peak):
    """Return a score that ``needed`` of ``values`` reach, and few more; the least that is drawn if not so many do."""
    low, high = peak - REACH, peak
    reach = tl.sum((values >= low).to(tl.int32), axis=0)
    if reach >= needed:
        low = tl.min(tl.where(values >= low, values, peak), axis=0)
    middle = low + (high - low) * 0.5
    # Bisect the values, which are in registers, until at most an eighth too many are left.
    while (reach > needed + needed // 8) & (middle > low) & (middle < high):
        above = tl.sum((values >= middle).to(tl.int32), axis=0)
        enough = above >= needed
        reach = tl.where(enough, above, reach)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        middle = low + (high - low) * 0.5
    return low


@triton.jit
def list_tiles(found, selected, part, parts: tl.constexpr, padded_tiles: tl.constexpr):
    """Write the numbers of a part's share of the selected tiles, in order; return how many they are."""
    # Tiles are dealt out to the parts one by one: likely ones are often neighbours.
    entries = tl.cumsum(selected.to(tl.int32), axis=0) - 1
    tl.store(found + entries // parts, tl.arange(0, padded_tiles), mask=selected & (entries % parts == part))
    tl.debug_barrier()  # written before other threads read it
    return (tl.sum(selected.to(tl.int32), axis=0) - part + parts - 1) // parts


@triton.jit
def list_candidates(source, found, count, bound, lists):
    """Write the tokens of ``count`` tiles that score at least ``bound``, and how many there are, or more than fit."""
    # Each warp has a list of its own, so that none waits for others in the loop: shapes are those in which Triton deals
    # tokens out to warps and their lanes.
    chunk: tl.constexpr = PART_CHUNK // (_WARPS * _LANES)
    place = tl.arange(0, PART_CHUNK) // _LANES % _WARPS * ROOM
    size = tl.zeros((_WARPS,), tl.int32)
    for first in range(0, count, PART_CHUNK // _TILE):
        token = listed_tokens(source, found, first, count, PART_CHUNK)
        scores = scores_of(source, token)
        kept = scores >= bound
        ones = tl.reshape(kept.to(tl.int32), (chunk, _WARPS, _LANES))
        totals = tl.sum(ones, axis=2)
        wide = tl.broadcast_to(totals[:, :, None], (chunk, _WARPS, _LANES))  # as its sums need no exchange
        entry = size[None, :, None] + tl.cumsum(wide, axis=0) - wide + tl.cumsum(ones, axis=2) - 1
        entry = tl.reshape(entry, (PART_CHUNK,))
        tl.store(lists.tokens + place + entry, token, mask=kept & (entry < ROOM))
        tl.store(lists.scores + place + entry, scores, mask=kept & (entry < ROOM))
        size += tl.sum(totals, axis=0)
    tl.store(lists.sizes + tl.arange(0, _WARPS), size)


@triton.jit
def listed_tokens(source, found, first, count, chunk: tl.constexpr):
    """Return a chunk of tokens of the tiles that are listed from ``first`` on; none stands after the last of them."""
    lane = tl.arange(0, chunk)
    entry = first + lane // _TILE
    tile = tl.load(found + entry, mask=entry < count, other=0)
    return tl.where(entry < count, tile * _TILE + lane % _TILE, source.vocabulary)


@triton.jit
def extent_of(sizes, bound, k, peak, vocabulary):
    """Return how far to look for what top-k keeps, whether that is in lists, and a score that it reaches."""
    own, least = tl.load(sizes + tl.arange(0, LISTS)), peak - REACH
    most = tl.max(own, axis=0)
    complete = (tl.sum(own, axis=0) >= k) | (bound <= least)
    listed = complete & (most <= ROOM)
    return tl.where(listed, most * LISTS, vocabulary), listed, tl.where(complete, bound, least)


@triton.jit
def block_of(source, lists, first, listed: tl.constexpr, block: tl.constexpr):
    """Return a block of tokens, of the lists or of the row, and their scores, -inf where there is none."""
    lane = tl.arange(0, block)
    if listed:
        entries: tl.constexpr = block // LISTS
        own, entry = lane // entries, first // LISTS + lane % entries
        exists = entry < tl.load(lists.sizes + own)
        token = tl.load(lists.tokens + own * ROOM + entry, mask=exists, other=0)
        scores = tl.load(lists.scores + own * ROOM + entry, mask=exists, other=float("-inf"))
    else:
        token = first + lane
        scores = scores_of(source, token, first)
    return token, scores
