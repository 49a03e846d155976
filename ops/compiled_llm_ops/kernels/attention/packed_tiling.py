"""How the kernel that attends with packed queries is tiled for speed; ``invariant_tiling`` has one tiling for all.

Nothing of it was measured yet; ``tools/fit_tilings.py --only packed-attention`` does. Sizes are the largest that
``ptxas`` gives registers to for Hopper, without spilling more than a few, and whose tiles a multiprocessor has shared
memory for. float32 has no tensor cores, as its products are those of IEEE 754: threads hold whole rows of a tile in
their registers, and tiles are small.

Shapes: G query heads of one kv head, D' head dimension as stored.
"""

from __future__ import annotations

from typing import NamedTuple

SMALLEST_HEAD, LARGEST_HEAD = 64, 512
"""Heads are stored with a power of two between them."""

FEWEST = 16
"""Queries and keys of a tile at least: what one instruction of a tensor core takes."""

_RESERVED = 1024
"""Bytes of shared memory that a program cannot use."""


class PackedTiling(NamedTuple):
    """Tiles of the kernel.

    Attributes:
        queries: of a tile, G for each token; a power of two.
        keys: of a tile; a power of two.
        stages: of the pipeline: tiles of keys and values that are loaded or used at a time.
        warps: in a program.
        fuses: whether a product and a sum may be one instruction, which rounds once.
    """

    queries: int
    keys: int
    stages: int
    warps: int
    fuses: bool = True


_LARGEST = {64: (128, 64, 3, 4), 128: (128, 64, 3, 8), 256: (64, 64, 2, 8), 512: (32, 32, 2, 8)}
_LARGEST_OF_FLOAT32 = {64: (16, 32, 2, 4), 128: (16, 32, 1, 4), 256: (16, 16, 1, 4), 512: (16, 16, 1, 8)}
"""By D'."""


def packed_tiling(
    row_queries: float, head_dim: int, query_bytes: int, number_bytes: int, shared_memory: int
) -> PackedTiling:
    """Return the largest tiling that a batch fills, and that a device has room for.

    Args:
        row_queries: of a row on average, G for each token.
        head_dim: D', a power of two from SMALLEST_HEAD to LARGEST_HEAD.
        query_bytes: of a number of the queries; 4 for float32.
        number_bytes: of a number in the pages.
        shared_memory: of a multiprocessor, in bytes.
    """
    queries, keys, stages, warps = (_LARGEST if query_bytes == 2 else _LARGEST_OF_FLOAT32)[head_dim]
    while queries > FEWEST and row_queries <= queries // 2:
        queries //= 2
    if queries < 128:
        warps = min(warps, 4 if head_dim <= 128 else 8)
    room = shared_memory - _RESERVED - queries * head_dim * query_bytes
    while 2 * stages * keys * head_dim * number_bytes > room and (stages > 1 or keys > FEWEST):
        stages, keys = (stages - 1, keys) if stages > 1 else (1, keys // 2)
    return PackedTiling(queries, keys, stages, warps)
