"""How the kernel that attends with packed queries is tiled for speed; ``invariant_tiling`` has those of equal bits."""

# Tilings of 16 bits are those that were fastest on an H100, with groups of 4 query heads: a prompt of 4,096 tokens, 8
# of 512, 4 ends of 128 tokens after 4,096 stored ones, and 32 rows of 4 tokens after 1,000. The rule is 9% slower than
# the best of all candidates in one of these 16 cases, and 2% at most in the others; ``tools/fit_tilings.py --only
# packed-attention`` measures that again. Those of float32 are the largest that ``ptxas`` gives registers to without
# spilling more than a few, and were not measured: it has no tensor cores, as its products are those of IEEE 754, so
# that threads hold whole rows of a tile in their registers.
# Shapes: G query heads of one kv head, D' head dimension as stored.

from __future__ import annotations

from typing import NamedTuple

SMALLEST_HEAD, LARGEST_HEAD = 64, 512  # heads are stored with a power of two between them

FEWEST = 16  # queries and keys of a tile at least: what one instruction of a tensor core takes

_RESERVED = 1024  # bytes of shared memory that a program cannot use


class PackedTiling(NamedTuple):
    """Tiles of the kernel."""

    queries: int  # of a tile, G for each token; a power of two
    keys: int  # of a tile; a power of two
    stages: int  # of the pipeline: tiles of keys and values that are loaded or used at a time
    warps: int
    fuses: bool = True  # whether a product and a sum may be one instruction, which rounds once
    ordered: bool = False  # whether weights are added in the order of keys, by tensor cores


_OF_16_BITS: dict[int, tuple[tuple[int, PackedTiling], ...]] = {
    64: ((0, PackedTiling(64, 64, 2, 4)),),
    128: ((4096, PackedTiling(128, 64, 3, 4)), (0, PackedTiling(64, 64, 2, 4))),
    256: ((1024, PackedTiling(128, 64, 2, 8)), (32, PackedTiling(64, 64, 2, 4)), (0, PackedTiling(16, 64, 2, 4))),
    512: ((1024, PackedTiling(64, 32, 2, 8)), (0, PackedTiling(16, 32, 2, 4))),
}
"""By D': from how many queries of a row on, and the tiling; the first that fits."""
# Few queries leave most of a tile of 64 empty, which costs less than smaller instructions.
_OF_FLOAT32 = {
    64: PackedTiling(16, 32, 2, 4),
    128: PackedTiling(16, 32, 1, 4),
    256: PackedTiling(16, 16, 1, 4),
    512: PackedTiling(16, 16, 1, 8),
}


def packed_tiling(
    row_queries: float, head_dim: int, query_bytes: int, number_bytes: int, shared_memory: int
) -> PackedTiling:
    """Return the tiling for a batch, smaller where a device has no room for it; shared memory is a multiprocessor's."""
    # ``row_queries`` are those of a row on average, G for each token; ``head_dim`` is a power of two from SMALLEST_HEAD
    # to LARGEST_HEAD.
    if query_bytes == 2:
        tiling = next(own for fewest, own in _OF_16_BITS[head_dim] if row_queries >= fewest)
    else:
        tiling = _OF_FLOAT32[head_dim]
    stages, keys = tiling.stages, tiling.keys
    room = shared_memory - _RESERVED - tiling.queries * head_dim * query_bytes
    while 2 * stages * keys * head_dim * number_bytes > room and (stages > 1 or keys > FEWEST):
        stages, keys = (stages - 1, keys) if stages > 1 else (1, keys // 2)
    return tiling._replace(stages=stages, keys=keys)
