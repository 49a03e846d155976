"""Split-KV: whether several blocks share the keys of a row, and what memory that takes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_llm_ops.contracts import Geometry
from compiled_llm_ops.flashinfer.versions import counts_pairs_as_queries

_BLOCKS_AT_ONCE = 2  # of a multiprocessor: FlashInfer splits rows into as many as fill the device


def split_bytes(geometry: Geometry, processors: int) -> int:
    """Return the bytes of float workspace that any plan takes at most which is not static.

    Args:
        geometry: the attention group.
        processors: multiprocessors of the device.
    """
    return _partial_results(geometry, _most_blocks(geometry, processors))


def static_split_bytes(geometry: Geometry, tokens: int, rows: int, processors: int) -> int:
    """Return the bytes of float workspace that a static plan takes at most.

    Such a plan counts every row as split, since a later batch's may be, and so has room for all queries.

    Args:
        geometry: the attention group.
        tokens: T of the first batch, the largest.
        rows: B.
        processors: multiprocessors of the device.
    """
    tiles = most_tiles(geometry, tokens, rows, _largest_tile(geometry))
    return _partial_results(geometry, max(_most_blocks(geometry, processors), tiles))


def most_tiles(geometry: Geometry, tokens: int, rows: int, tile: int) -> int:
    """Return how many tiles of (token, head of the group) pairs so many tokens of so many rows have at most."""
    return -(-tokens * (geometry.query_heads // geometry.kv_heads) // tile) + rows - 1


def _most_blocks(geometry: Geometry, processors: int) -> int:
    """Return how many blocks split rows get for each kv head."""
    return _BLOCKS_AT_ONCE * processors // geometry.kv_heads


def _largest_tile(geometry: Geometry) -> int:
    """Return the most (token, head of the group) pairs in a block."""
    return 128 if geometry.head_dim < 256 else 64 if geometry.head_dim < 512 else 32


def _partial_results(geometry: Geometry, blocks: int) -> int:
    """Return the bytes of a result and a log-sum-exp in float32 for each query, with room to align both."""
    pairs = blocks * _largest_tile(geometry)
    queries = pairs if counts_pairs_as_queries() else -(-pairs * geometry.kv_heads // geometry.query_heads)
    return geometry.query_heads * queries * (geometry.head_dim + 1) * 4 + 32


def worth_splitting(
    geometry: Geometry, queries: NDArray[np.integer[Any]], lengths: NDArray[np.integer[Any]], processors: int
) -> bool:
    """Return whether a prefill is faster if blocks share the keys of a row, and merge what each has found.

    A block goes over the keys of its tile of queries one after the other, so the longest row sets the time unless its
    keys are shared; faster by two fifths as long as no two blocks are on one multiprocessor. Merging takes as long as
    going over so many keys. FlashInfer itself shares them whenever blocks would otherwise be fewer than fill the
    device: on an H200, 1 row of 512 new tokens and 32 query heads takes 60 us instead of 30.

    Args:
        geometry: the attention group.
        queries: ``[B]``, new tokens of each row.
        lengths: ``[B]``, all tokens of each row.
        processors: multiprocessors of the device.

    Source:
        Measured on an H200 with 16 query heads, 8 kv heads of size 128, 1 and 8 rows, 16 to 2,048 new tokens behind 0
        to 2,048: where it chooses the slower way, that is slower by at most 3%.
    """
    tile = _largest_tile(geometry)
    seen = lengths if geometry.window_left < 0 else np.minimum(lengths, geometry.window_left + tile)
    tiles = -(-queries * (geometry.query_heads // geometry.kv_heads) // tile)
    longest, tokens = int(seen[tiles > 0].max(initial=0)), int(queries.sum())
    alone = most_tiles(geometry, tokens, len(queries), tile) * geometry.kv_heads <= processors
    shared = int(tiles @ seen) * geometry.kv_heads / (_BLOCKS_AT_ONCE * processors)
    merging = 64 + tokens * geometry.query_heads / 18
    return longest * (0.6 if alone else 1) - shared > merging
