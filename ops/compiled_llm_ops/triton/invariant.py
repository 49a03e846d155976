"""Batch-invariant attention over pages, which is not planned: the kernel reads the page table as it is then."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts import Geometry, PagedAttention
from compiled_llm_ops.protocol import DecodeOps, EmptyPlan, EmptyWorkspace, PagedKernels
from compiled_llm_ops.triton import plain


class InvariantPlan(EmptyPlan):
    """An empty plan; see ``protocol.Plan``."""

    def launch(self, args: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        if not out.is_cuda:
            plain.attend_row_by_row(args, out, lse)
            return
        from compiled_llm_ops.kernels.attention.invariant_tiling import invariant_tiling
        from compiled_llm_ops.kernels.attention.packed import PackedQueries, attend

        queries, tiling = PackedQueries.of(args), invariant_tiling(args.pages.shape[-1])
        with torch.cuda.device(out.device):  # Triton launches on the current one
            attend(queries, out, lse, tiling)


class Invariant(PagedKernels):
    """The batch-invariant backend; see ``protocol.Backend``."""

    devices: tuple[str, ...] = ("cuda", "cpu")
    dtypes = frozenset({torch.float16, torch.bfloat16})

    def missing_kernel(self, geometry: Geometry) -> str | None:
        from compiled_llm_ops.kernels.attention.invariant_tiling import LARGE_HEAD

        if self.stored_head_dim(geometry.head_dim) > LARGE_HEAD:
            return f"there is no kernel for heads of size {geometry.head_dim}: the largest is {LARGE_HEAD}"
        return None

    def new_plan(self, workspace: EmptyWorkspace, nbytes: int) -> InvariantPlan:
        return InvariantPlan(workspace.buffer.device)

    def decode_ops(self, device: str) -> DecodeOps | None:
        ops = torch.ops.compiled_llm
        return DecodeOps(
            ops.invariant_attention.default, ops.invariant_attention_lse.default, prepare=True, several=True
        )


BACKEND = Invariant()
