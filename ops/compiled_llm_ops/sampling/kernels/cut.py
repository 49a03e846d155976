"""Where top-k and top-p cut: passes over a row's candidates, or over the row."""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from compiled_llm_ops.sampling.kernels.candidates import block_of

# So many tokens are compared with so many pivots at a time.
LIST_BLOCK, LIST_PIVOTS = tl.constexpr(1024), tl.constexpr(8)
ROW_BLOCK, ROW_PIVOTS = tl.constexpr(4096), tl.constexpr(4)


@triton.jit
def cut_of(source, lists, extent, bound, peak, total, k, p, listed: tl.constexpr):
    """Return the score from which on top-k and top-p keep tokens, which is not below ``bound``."""
    # A loop has both searches, because Triton compiles a call again wherever it stands.
    for by_mass in range(tl.where(k > 0, 0, 1), tl.where(p < 1.0, 2, 1)):
        needed = k.to(tl.float32)
        if by_mass != 0:
            needed = p * total
            # All below this have less mass together than top-p may leave out.
            bound = tl.maximum(bound, peak + tl.log(0.5 * (1.0 - p) * total / source.vocabulary))
        bound, total = _search(source, lists, extent, bound, peak, needed, by_mass != 0, listed)
    return bound


@triton.jit
def _search(source, lists, extent, low, peak, needed, by_mass, listed: tl.constexpr):
    """Return a score like the largest which, with all larger ones, has ``needed``, and the mass from there on."""
    # It separates the same tokens; ``needed`` is a mass, or a number of tokens. Pivots divide the interval from ``low``
    # to the largest score, more closely at the low end, where filters cut, as most scores are there. Each pass leaves
    # the part between two of them, until one score is left in it.
    pivots: tl.constexpr = LIST_PIVOTS if listed else ROW_PIVOTS
    block: tl.constexpr = LIST_BLOCK if listed else ROW_BLOCK
    high = peak + tl.abs(peak) * 1e-6 + 1e-30
    several, mass = True, 0.0
    while several:
        share = (tl.arange(0, pivots) + 1) * (1.0 / (pivots + 1))
        pivot = low + (high - low) * (share * share)
        sums = tl.zeros((pivots, block), tl.float32)
        masses = tl.zeros((block,), tl.float32)
        least = tl.full((block,), float("inf"), tl.float32)
        most = tl.full((block,), float("-inf"), tl.float32)
        for first in range(0, extent, block):
            _, scores = block_of(source, lists, first, listed, block)
            weights = tl.exp(scores - peak)
            masses += tl.where(scores >= low, weights, 0.0)
            weights = tl.where(by_mass, weights, 1.0)
            sums += tl.where(scores[None, :] >= pivot[:, None], weights[None, :], 0.0)
            inside = (scores >= low) & (scores < high)
            least = tl.minimum(least, tl.where(inside, scores, float("inf")))
            most = tl.maximum(most, tl.where(inside, scores, float("-inf")))
        # Scores repeat: the search ends when all that are left in the interval are equal, not when it is empty.
        bottom, top = tl.min(least, axis=0), tl.max(most, axis=0)
        several = bottom < top
        if several:
            enough = tl.sum(sums, axis=1) >= needed
            low = tl.maximum(bottom, tl.max(tl.where(enough, pivot, low), axis=0))
            high = tl.min(tl.where(enough, high, pivot), axis=0)
        else:
            mass = tl.sum(masses, axis=0)
    return low, mass
