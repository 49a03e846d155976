"""What kernels that compute chunks of a row's tokens have in common."""

# Shapes: B rows, L tokens of a chunk, N blocks of a matrix, S rows of a block.

# Kernels are Triton's objects, not the functions that a type checker sees.
# pyright: reportIndexIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from compiled_llm_ops.kernels.attention.packed import row_of

LOWEST = tl.constexpr(-128.0)
"""A factor of ``exp`` of less is 0 in float32. Sums of what is this large keep the small decays that come after it."""


@triton.jit
def chunk_of(tile, qo_indptr, rows, CHUNK: tl.constexpr):
    """Return the first token of a chunk, and the end of its row; the first is not before the end if there is none."""
    row = row_of(tile, qo_indptr, rows, CHUNK, 1)
    begin, end = tl.load(qo_indptr + row), tl.load(qo_indptr + row + 1)
    return begin + (tile - begin // CHUNK - row) * CHUNK, end


@triton.jit
def log_factors(decay):
    """Return logarithms of factors that float32 has; NaN stays NaN."""
    decay = decay.to(tl.float32)
    return tl.where(decay < LOWEST, LOWEST, decay)


@triton.jit
def unit_inverse(lower, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of I + lower, for a strictly lower triangular matrix ``[L, L]`` in float32."""
    # Inverses of blocks on the diagonal become those of blocks twice as large. In this order, sums do not grow beyond
    # what the inverse itself has, which sums of the matrix's powers do: those of equal keys reach 1e18.
    SMALL: tl.constexpr = CHUNK // 16
    small, each = diagonal_blocks(lower, SMALL, 16), tl.arange(0, 16)
    inverse = tl.where(each[:, None] == each[None, :], 1.0, 0.0)[None] - tl.where(left_below(16, 1), small, 0.0)
    # Instructions of tensor cores have 16 rows at least, so within blocks of 16 they multiply zeros, too.
    inverse = joined(inverse, small, 16, 2, PRECISION)
    inverse = joined(inverse, small, 16, 4, PRECISION)
    inverse = joined(inverse, small, 16, 8, PRECISION)
    inverse = joined_pairs(inverse, lower, SMALL, 16, PRECISION)
    inverse = joined_pairs(inverse, lower, SMALL // 2, 32, PRECISION)
    return tl.reshape(inverse, [CHUNK, CHUNK])


@triton.jit
def joined(inverse, lower, SIZE: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Return inverses ``[N, S, S]`` whose blocks on the diagonal, of HALF rows before, have twice as many."""
    off = tl.where(left_below(SIZE, HALF), lower, 0.0)
    return inverse - tl.dot(
        tl.dot(inverse, off, input_precision=PRECISION), inverse, input_precision=PRECISION
    )  # fmt: skip


@triton.jit
def left_below(SIZE: tl.constexpr, HALF: tl.constexpr):
    """Return ``[1, S, S]``: what is below the first and left of the second of two blocks of HALF rows."""
    block = tl.arange(0, SIZE) // HALF
    return ((block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1))[None]


@triton.jit
def joined_pairs(inverse, lower, BLOCKS: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Return ``[N / 2, 2 * S, 2 * S]``, of inverses ``[N, S, S]`` and the matrix ``[N * S, N * S]``."""
    PAIRS: tl.constexpr = BLOCKS // 2
    pair, half = tl.arange(0, PAIRS), tl.arange(0, 2)
    parts = tl.reshape(lower, [PAIRS, 2, SIZE, PAIRS, 2, SIZE])
    own = pair[:, None, None, None, None, None] == pair[None, None, None, :, None, None]
    own = own & (half[None, :, None, None, None, None] == 1) & (half[None, None, None, None, :, None] == 0)
    below = tl.sum(tl.sum(tl.sum(tl.where(own, parts, 0.0), 4), 3), 1)
    pairs = tl.reshape(inverse, [PAIRS, 2, SIZE, SIZE])
    is_second = half[None, :, None, None] == 1
    first, second = tl.sum(tl.where(is_second, 0.0, pairs), 1), tl.sum(tl.where(is_second, pairs, 0.0), 1)
    below = tl.dot(tl.dot(second, below, input_precision=PRECISION), first, input_precision=PRECISION)
    of_row, of_column = half[None, :, None, None, None], half[None, None, None, :, None]
    off = tl.where(of_row > of_column, -below[:, None, :, None, :], 0.0)
    return tl.reshape(tl.where(of_row == of_column, pairs[:, :, :, None, :], off), [PAIRS, 2 * SIZE, 2 * SIZE])


@triton.jit
def diagonal_blocks(matrix, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    """Return ``[N, S, S]`` of a matrix of N * S rows."""
    parts = tl.reshape(matrix, [BLOCKS, SIZE, BLOCKS, SIZE])
    number = tl.arange(0, BLOCKS)
    own = number[:, None, None, None] == number[None, None, :, None]
    return tl.sum(tl.where(own, parts, 0.0), 2)
