"""How the kernel of ``invariant_attention`` is tiled: by the shape of the heads alone, never by the batch."""

# The order of the sums follows from these constants, so all rows of all batches share them. 64 queries are what one
# warpgroup multiplies, in decode as well, where most of them are padding: tiles of 16 queries take 0.81 to 0.94 of the
# time in decode, and twice as long in prefill. Fitted on an H100 with heads of 128, in both: 1.09 times the time of the
# tiling that is best at each, on average. ``tools/fit_tilings.py --only invariant-attention`` measures that again.
# Shapes: G query heads of one kv head, D' head dimension as stored.

from __future__ import annotations

from compiled_llm_ops.kernels.attention.packed_tiling import PackedTiling

QUERIES = 64  # queries of a tile, those of G heads for each token: what one instruction of a tensor core takes

KEYS, KEYS_OF_LARGE_HEADS = 64, 32  # keys of a tile; tiles begin at multiples of it, counted from the row's first token

STAGES = 2  # stages of the pipeline: one tile is being loaded while another one is used; with three, programs are fewer

WARPS, WARPS_OF_LARGE_HEADS = 4, 8

LARGE_HEAD = 256  # head sizes from which on four warps have too few registers


def invariant_tiling(head_dim: int) -> PackedTiling:
    """Return the tiling for heads that are stored with this size, D'."""
    if head_dim >= LARGE_HEAD:
        return PackedTiling(QUERIES, KEYS_OF_LARGE_HEADS, STAGES, WARPS_OF_LARGE_HEADS, fuses=False)
    return PackedTiling(QUERIES, KEYS, STAGES, WARPS, fuses=False)
