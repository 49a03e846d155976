"""The numbers of ``race``, in Triton: on the device they are computed where they are needed, and not kept."""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from compiled_llm_ops.contracts import OF_TILES, OF_TOKENS, TILE

_TILE = tl.constexpr(TILE)
_OF_TILES, _OF_TOKENS = tl.constexpr(OF_TILES), tl.constexpr(OF_TOKENS)


@triton.jit
def least_of_tiles(seed, position, tile):
    """Return each tile's least exponential number, and the place in it of the token that has it."""
    high, low, place, _ = _words(seed, position, tile, _OF_TILES)
    return _exponential(high, low) * (1.0 / _TILE), (place % _TILE).to(tl.int32)


@triton.jit
def exponentials(seed, position, token):
    """Return the exponential random numbers of tokens."""
    least, first = least_of_tiles(seed, position, token // _TILE)
    high, low, _, _ = _words(seed, position, token, _OF_TOKENS)
    return least + tl.where(token % _TILE == first, 0.0, _exponential(high, low))


@triton.jit
def _words(seed, position, number, kind: tl.constexpr):
    """Return four words of 32 bits for each number of a tile or a token."""
    low, high = position.to(tl.int32), (position >> 32).to(tl.int32)
    return tl.philox(seed, number, tl.full((1,), kind, tl.int32), low, high)


@triton.jit
def _exponential(high, low):
    """Return exponential numbers in float32, each of two words; small ones, which win, are as precise as others."""
    share = high.to(tl.float32) * 2.0**-32 + (low.to(tl.float32) + 0.5) * 2.0**-64
    share = tl.minimum(share, 1.0 - 2.0**-24)
    # Of small shares, 1 - share has lost the bits that matter: there the first terms of the series say more.
    series = share * (1.0 + share * (0.5 + share * (1.0 / 3.0 + share * (0.25 + share * 0.2))))
    return tl.where(share < 0.0625, series, -tl.log(1.0 - share))
