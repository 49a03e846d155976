"""What backends have in common whose kernels are ours: they append by one, over heads that are stored alike."""

from __future__ import annotations

from compiled_llm_ops.contracts import FP8, AppendPagedKv
from compiled_llm_ops.protocol import Unplanned


class PagedKernels(Unplanned):
    """The part of ``protocol.Backend`` that does not depend on how attention is tiled."""

    kv_dtypes = frozenset({FP8})
    capturable = True
    uneven_heads = False
    rope_append = True  # by the kernel that decode has, too

    def stored_head_dim(self, head_dim: int) -> int:
        from compiled_llm_ops.kernels.attention.packed_tiling import SMALLEST_HEAD

        return max(SMALLEST_HEAD, 1 << (head_dim - 1).bit_length())

    def append(self, args: AppendPagedKv) -> None:
        from compiled_llm_ops.kernels.attention.rope_append import append

        append(args)
