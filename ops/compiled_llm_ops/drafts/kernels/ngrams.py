"""The CUDA kernels of ``ngram_drafts``, in Triton."""

# The first one looks through a text with many programs, each of which notes the best place of its part: in a number
# that is larger the more tokens are the same, among equals if k tokens come after it, and then the later it is. The
# second one takes the largest.
# Most programs find nothing, or one token: what they take is the time in which their part is read. So parts are large,
# to have many bytes under way, and of more tokens only those are read that still may match.
# Shapes: B rows.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm_ops.drafts.contracts import NgramDrafts

_PART, _WARPS = 2048, 4
"""Tokens that a program looks through, and the warps that do."""

_PARTS = 64
"""Parts whose best places are compared at once: texts of any length run the same kernel."""

_PLACES = tl.constexpr(2**32)
_WHOLE = tl.constexpr(2**30)
"""Is added to places after which k tokens come; texts are shorter."""


def ngram_drafts(args: NgramDrafts) -> tuple[Tensor, Tensor]:
    """Launch the kernels; ``args`` are checked."""
    texts, (rows,), length, k = args.texts, args.slots.shape, args.texts.shape[1], args.k
    parts = triton.cdiv(length, _PART)
    found = torch.empty(rows, parts, dtype=torch.int64, device=texts.device)
    tokens = torch.empty(rows, k, dtype=torch.int32, device=texts.device)
    counts = torch.empty(rows, dtype=torch.int32, device=texts.device)
    given = (texts, args.slots, args.lengths)
    _find_earlier[(rows, parts)](*given, args.longest, args.shortest, found, length, k, PART=_PART, num_warps=_WARPS)
    sizes = {"PART": _PART, "PARTS": _PARTS, "K": triton.next_power_of_2(k)}
    _copy_following[(rows,)](*given, found, tokens, counts, length, parts, k, **sizes, num_warps=1)
    return tokens, counts


@triton.jit(do_not_specialize=["k"])
def _find_earlier(texts, slots, lengths, longest, shortest, found, length, k, PART: tl.constexpr):
    """Write the best place of a part of a text, -1 if there is none; grid ``(B, parts)``."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.minimum(tl.load(lengths + row), length)
    if part * PART < count - 1:
        slot = tl.load(slots + row)
        text, most = texts + slot * length, tl.load(longest + slot)
        end = part * PART + tl.arange(0, PART)  # where the tokens that are looked for may end
        # Up to a multiple of 16, so that no load of four tokens is cut in two; what lies behind the text is not used.
        there = tl.load(text + end, mask=(end < length) & (end < tl.cdiv(count, 16) * 16), other=-1)
        wanted = tl.load(text + count - 1)
        same = (there == wanted) & (wanted >= 0) & (end < count - 1) & (most > 0)
        matched, back = same.to(tl.int32), 1
        while (back < most) & (tl.max(same.to(tl.int32), axis=0) != 0):
            wanted = tl.load(text + count - 1 - back, mask=back < count, other=-1)
            there = tl.load(text + end - back, mask=same & (end >= back), other=-1)
            same = same & (there == wanted) & (wanted >= 0)
            matched += same.to(tl.int32)
            back += 1
        most = tl.max(matched, axis=0)
        place = end + tl.where(end < count - k, _WHOLE, 0)
        place = tl.max(tl.where(matched == most, place, 0), axis=0)
        enough = most >= tl.maximum(tl.load(shortest + slot), 1)
        best = tl.where(enough, most.to(tl.int64) * _PLACES + place, -1)
        tl.store(found + row * tl.num_programs(1) + part, best)


@triton.jit(do_not_specialize=["k", "parts"])
def _copy_following(
    texts, slots, lengths, found, tokens, counts, length, parts, k,
    PART: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write what follows the best place of all parts; grid ``(B,)``."""
    row = tl.program_id(0).to(tl.int64)
    count, at = tl.minimum(tl.load(lengths + row), length), tl.arange(0, K)
    places = tl.full((PARTS,), -1, tl.int64)
    for first in range(0, tl.cdiv(count - 1, PART), PARTS):  # others have found nothing
        part = first + tl.arange(0, PARTS)
        looked = part * PART < count - 1
        places = tl.maximum(places, tl.load(found + row * parts + part, mask=looked, other=-1))
    best = tl.max(places, axis=0)
    place = best % _WHOLE + 1 + at
    exists = (best >= 0) & (place < count) & (at < k)
    token = tl.load(texts + tl.load(slots + row) * length + place, mask=exists, other=-1)
    known = tl.min(tl.where(token < 0, at, k), axis=0)
    tl.store(tokens + row * k + at, tl.where(at < known, token, 0), mask=at < k)
    tl.store(counts + row, known)
