"""When kernels of recurrent layers compute chunks of a row's tokens at once, and how these are tiled."""

# On an H100 a prompt of 1,024 tokens takes Qwen3.5's delta rule 111 microseconds in chunks and 1,496 token by token,
# and 8 of them 521 and 3,651 (``tools/bench/recurrent.py`` of commit d868dfb9). From how many tokens on chunks pay off,
# and how they are tiled, was not fitted. All of it follows from shapes, so a CUDA graph that was captured for some rows
# is right for any others of these shapes.
# Shapes: T packed tokens, B rows, D size of a key, V size of a value.

from __future__ import annotations

from typing import NamedTuple

CHUNK = 64  # tokens of a chunk: as many as one instruction of a warp group has rows

LARGEST_KEY = 128
"""D of the largest keys that are computed in chunks, for which registers and shared memory have room."""
# Registers hold a state's D numbers for each column, and shared memory two chunks of D columns. With one chunk at a
# time, which larger keys would leave room for, Triton 3.6 made a kernel of bfloat16 on an H100 that read where nothing
# is.

FEW = 16  # so many tokens, beside one of each row, are fewer than chunks pay off for

PROGRAMS = 264  # programs at once that keep a GPU busy: two for each multiprocessor of an H100


def takes_chunks(count: int, rows: int, size: int) -> bool:
    """Whether kernels that compute chunks are faster than one that walks from token to token."""
    # Shapes do not tell how many tokens the longest row has. That walk is short where rows have one each, and as long
    # as a prompt where one row has all others. ``count`` is T, those of padding included.
    return size <= LARGEST_KEY and count > rows + FEW


def chunks_of(count: int, rows: int) -> int:
    """Return how many chunks there are at most: those of row b are numbered from ``qo_indptr[b] // CHUNK + b`` on."""
    return count // CHUNK + rows


class ChunkTiling(NamedTuple):
    """Tiles of the kernel that walks over chunks."""

    columns: int  # of the state that a program has; a power of two
    stages: int  # of the pipeline: chunks that are loaded or used at a time
    warps: int


def chunk_tiling(rows_and_heads: int, value_size: int, number_bytes: int) -> ChunkTiling:
    """Return the tiling of the delta rule's walk; numbers of so many bytes are multiplied, 4 for float32."""
    # Wide programs read keys and queries less often, narrow ones are more: a GPU that is not full takes narrow ones.
    columns, stages, warps = (64, 2, 4) if number_bytes == 2 else (32, 1, 8)
    while columns > 16 and (columns >= 2 * value_size or rows_and_heads * value_size < PROGRAMS // 2 * columns):
        columns //= 2
    return ChunkTiling(columns, stages, warps)
