"""How the kernel of ``invariant_attention`` is tiled, so that a query has the same bits in any batch."""

# The order of the sums follows from the keys of a tile alone: tensor cores add the products of a tile, 16 at a time, in
# ascending order, and so they add weights (``ordered``), which threads would add as they happen to hold them. So rows
# of one token may have tiles of 16 queries: 64 are what one warpgroup multiplies, and in decode most of them are
# padding. Both were seen to have equal bits on an H200, in 16 bits, with heads of 64 and 128;
# ``tests/ops/invariant/test_invariant_gpu.py`` compares them. Elsewhere all rows share the tiling of 64 queries.
# Shapes: B rows, K kv heads, G query heads of one kv head, D' head dimension as stored.

from __future__ import annotations

from compiled_llm_ops.kernels.attention.packed_tiling import PackedTiling

QUERIES = 64  # queries of a tile, those of G heads for each token: what one instruction of a tensor core takes

KEYS, KEYS_OF_LARGE_HEADS = 64, 32  # keys of a tile; tiles begin at multiples of it, counted from the row's first token

STAGES = 2  # stages of the pipeline: one tile is being loaded while another one is used; with three, programs are fewer

WARPS, WARPS_OF_LARGE_HEADS = 4, 8

LARGE_HEAD = 256  # head sizes from which on four warps have too few registers

ONE_TOKEN = PackedTiling(16, KEYS, STAGES, 2, fuses=False, ordered=True)


def invariant_tiling(head_dim: int) -> PackedTiling:
    """Return the tiling for heads that are stored with this size, D'."""
    if head_dim >= LARGE_HEAD:
        return PackedTiling(QUERIES, KEYS_OF_LARGE_HEADS, STAGES, WARPS_OF_LARGE_HEADS, fuses=False, ordered=True)
    return PackedTiling(QUERIES, KEYS, STAGES, WARPS, fuses=False, ordered=True)


def invariant_decode_tiling(head_dim: int, queries: int, programs: int, processors: int) -> PackedTiling:
    """Return the tiling for rows of so few queries each, G for each token, on Hopper; the bits are the same."""
    # ``programs`` are B K, one for each row and kv head. If a multiprocessor has several, more small ones run at once:
    # on an H200 256 rows of 600 keys take 150 us and not 176, 32 of 1,000 take 36.9 and not 38.1, 8 take 20.8 and not
    # 19.9.
    if head_dim < LARGE_HEAD and queries <= ONE_TOKEN.queries and programs > processors:
        return ONE_TOKEN
    return invariant_tiling(head_dim)
