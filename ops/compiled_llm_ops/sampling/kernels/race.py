"""The random numbers of ``race``, in Triton: the kernels compute them where they need them."""

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from compiled_llm_ops.contracts.sampling import OF_TILES, OF_TOKENS

_OF_TILES, _OF_TOKENS = tl.constexpr(OF_TILES), tl.constexpr(OF_TOKENS)


@triton.jit
def log_exponentials_of_tiles(seed, position, tile, attempt):
    return _log_exponentials(seed, position, tile, _OF_TILES + 2 * attempt)


@triton.jit
def log_exponentials_of_tokens(seed, position, token, attempt):
    return _log_exponentials(seed, position, token, _OF_TOKENS + 2 * attempt)


@triton.jit
def _log_exponentials(seed, position, number, use):
    """Return them in float32, each of two words; those of small numbers, which win, are as precise as others."""
    low, high = position.to(tl.int32), (position >> 32).to(tl.int32)
    first, second, _, _ = tl.philox(seed, number, tl.zeros_like(number) + use, low, high)
    share = first.to(tl.float32) * 2.0**-32 + (second.to(tl.float32) + 0.5) * 2.0**-64
    share = tl.minimum(share, 1.0 - 2.0**-24)
    # Of small shares, 1 - share has lost the bits that matter: there the first terms of the series say more.
    series = share * (1.0 + share * (0.5 + share * (1.0 / 3.0 + share * (0.25 + share * 0.2))))
    return tl.log(tl.where(share < 0.0625, series, -tl.log(1.0 - share)))
