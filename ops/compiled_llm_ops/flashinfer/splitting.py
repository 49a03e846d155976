"""Split-KV: whether several blocks share the keys of a row, and the memory for that."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_llm_ops.contracts import Geometry
from compiled_llm_ops.flashinfer.versions import counts_pairs_as_queries

WHOLE, SPLIT = 0, 1  # schedules of a plan: one block goes over all keys of a tile of queries, or several share them

_BLOCKS_AT_ONCE = 2  # resident blocks per multiprocessor; FlashInfer splits rows until the device is full


def split_bytes(geometry: Geometry, processors: int) -> int:
    """Return an upper bound on the workspace of a plan whose launches are not captured, in bytes."""
    return _partial_results(geometry, _max_blocks(geometry, processors), _largest_tile(geometry))


def captured_split_bytes(geometry: Geometry, tokens: int, rows: int, processors: int) -> int:
    """Return an upper bound on the workspace of a plan whose launches are captured and split, in bytes."""
    # Such a plan counts every row as split, since a later batch's may be, and so has room for all queries.
    tile = captured_tile(geometry, tokens, rows)
    tiles = max_tiles(geometry, tokens, rows, tile)
    return _partial_results(geometry, max(_max_blocks(geometry, processors), tiles), tile)


def max_tiles(geometry: Geometry, tokens: int, rows: int, tile: int) -> int:
    """Return the most tiles of (token, head of the group) pairs that the tokens of these rows can have."""
    return -(-tokens * (geometry.query_heads // geometry.kv_heads) // tile) + rows - 1


def whole_tiles(geometry: Geometry, queries: Sequence[int]) -> int:
    """Return the most tiles that rows of so many new tokens can have, if none is split."""
    return max_tiles(geometry, sum(queries), len(queries), _largest_tile(geometry))


def _max_blocks(geometry: Geometry, processors: int) -> int:
    return _BLOCKS_AT_ONCE * processors // geometry.kv_heads


def _largest_tile(geometry: Geometry) -> int:
    """Return the most (token, head of the group) pairs in a block."""
    return 128 if geometry.head_dim < 256 else 64 if geometry.head_dim < 512 else 32


def captured_tile(geometry: Geometry, tokens: int, rows: int) -> int:
    """Return the pairs in a captured launch's block: enough for the longest row that the others leave room for."""
    # ``FA2DetermineCtaTileQ`` in FlashInfer's ``utils.cuh``.
    longest = (tokens - rows + 1) * (geometry.query_heads // geometry.kv_heads)
    if geometry.head_dim >= 512:
        return 16 if longest <= 32 else 32
    if longest > 64:
        return _largest_tile(geometry)
    return 64 if longest > 16 else 16


def _partial_results(geometry: Geometry, blocks: int, tile: int) -> int:
    """Return the bytes of a result and a log-sum-exp in float32 for each query, with room to align both."""
    pairs = blocks * tile
    queries = pairs if counts_pairs_as_queries() else -(-pairs * geometry.kv_heads // geometry.query_heads)
    return geometry.query_heads * queries * (geometry.head_dim + 1) * 4 + 32


def worth_splitting(geometry: Geometry, queries: Sequence[int], lengths: Sequence[int], processors: int) -> bool:
    """Return whether a prefill is faster if blocks share the keys of a row and merge their results."""
    # ``queries`` ``[B]`` are the new tokens of each row, ``lengths`` ``[B]`` all tokens. A block goes over the keys of
    # its tile of queries one after the other, so the longest row sets the time unless blocks share its keys. A block is
    # two fifths faster as long as no two are on one multiprocessor. Merging takes as long as going over ``merging``
    # keys. FlashInfer itself shares keys whenever there are too few blocks to fill the device: on an H200, 1 row of 512
    # new tokens and 32 query heads takes 60 us instead of 30.
    # Measured on an H200 with 16 query heads, 8 kv heads of size 128, 1 and 8 rows, 16 to 2,048 new tokens after 0 to
    # 2,048: if it chooses the slower one, that is slower by at most 3%.
    # Plain numbers: of few rows, all that numpy would do is wait for its own code to come into the caches.
    tile, group, tokens = _largest_tile(geometry), geometry.query_heads // geometry.kv_heads, sum(queries)
    most = max(lengths, default=0) if geometry.window_left < 0 else geometry.window_left + tile
    longest = pairs = 0
    for count, length in zip(queries, lengths, strict=True):
        if count > 0:
            seen = min(length, most)
            longest = max(longest, seen)
            pairs += -(-count * group // tile) * seen
    alone = whole_tiles(geometry, queries) * geometry.kv_heads <= processors
    shared = pairs * geometry.kv_heads / (_BLOCKS_AT_ONCE * processors)
    merging = 64 + tokens * geometry.query_heads / 18
    return longest * (0.6 if alone else 1) - shared > merging
