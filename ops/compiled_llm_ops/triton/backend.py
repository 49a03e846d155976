"""Triton kernels of our own as a backend, in prefill and decode, without plans; see ``protocol.Backend``."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts import Geometry, PagedAttention
from compiled_llm_ops.protocol import DecodeOps, EmptyPlan, EmptyWorkspace, PagedKernels, own_decode_ops

FLOAT32_VALUES = 2**14
"""Values of a row's queries for one kv head that the decode kernel takes in float32, padded to powers of two."""


class TritonPlan(EmptyPlan):
    """An empty plan; see ``protocol.Plan``."""

    def launch(self, args: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        from compiled_llm_ops.kernels.attention.packed import PackedQueries, attend

        with torch.cuda.device(out.device):  # Triton launches on the current one
            attend(PackedQueries.of(args), out, lse)


class Triton(PagedKernels):
    """The backend of our own kernels; see ``protocol.Backend``."""

    devices: tuple[str, ...] = ("cuda",)
    dtypes = frozenset({torch.float16, torch.bfloat16, torch.float32})

    def missing_kernel(self, geometry: Geometry) -> str | None:
        from compiled_llm_ops.kernels.attention.packed_tiling import LARGEST_HEAD

        group, remainder = divmod(geometry.query_heads, geometry.kv_heads)
        if remainder:
            return f"{geometry.query_heads} query heads are no multiple of {geometry.kv_heads} kv heads"
        if geometry.head_dim > LARGEST_HEAD:
            return f"there is no kernel for heads of size {geometry.head_dim}: the largest is {LARGEST_HEAD}"
        if geometry.dtype not in self.dtypes:
            return f"there is no kernel for {geometry.dtype} queries; use torch.bfloat16, float16 or float32"
        most = FLOAT32_VALUES // self.stored_head_dim(geometry.head_dim)
        if geometry.dtype == torch.float32 and group > most:
            return (
                f"there is no kernel in float32 for {group} query heads of size {geometry.head_dim} of one kv head: "
                f"at most {most}"
            )
        return None

    def new_plan(self, workspace: EmptyWorkspace, nbytes: int) -> TritonPlan:
        return TritonPlan(workspace.buffer.device)

    def decode_ops(self, device: str) -> DecodeOps:
        return own_decode_ops()


BACKEND = Triton()
