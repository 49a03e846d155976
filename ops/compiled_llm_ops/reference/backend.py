"""Plain PyTorch behind the ops: no plan, no workspace, any head size and type; it waits for the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compiled_llm_ops import plain_attention
from compiled_llm_ops.contracts import SCALED_DTYPES, AppendPagedKv, Geometry, PagedAttention, table_of
from compiled_llm_ops.protocol import (
    KERNELS,
    DecodeOps,
    EmptyPlan,
    EmptyWorkspace,
    Launch,
    Unplanned,
    own_decode_ops,
)


class ReferencePlan(EmptyPlan):
    """A plan that decides nothing, since the kernels need none; see ``protocol.Plan``."""

    kernels: Mapping[str, Launch] = KERNELS["reference"]

    def launch(self, args: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        how = (args.scale, args.window_left, args.logits_soft_cap, lse is not None)
        scales = args.key_scale, args.value_scale
        _, result_lse = plain_attention.attend_row_by_row(
            args.query, args.pages, table_of(args), *how, *scales, into=out
        )
        if lse is not None and result_lse is not None:
            lse.copy_(result_lse)


KERNELS["reference"]["uneven heads"] = ReferencePlan.launch


class Reference(Unplanned):
    """The reference backend; see ``protocol.Backend``."""

    devices: tuple[str, ...] = ("cuda", "cpu")
    dtypes = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
    kv_dtypes = frozenset(SCALED_DTYPES)
    capturable = False  # it reads lengths from the device
    kernels: Mapping[str, Launch] = KERNELS["reference"]
    rope_append = False  # it is to share no kernel with the others

    def missing_kernel(self, geometry: Geometry) -> str | None:
        return None

    def stored_head_dim(self, head_dim: int) -> int:
        return head_dim

    def new_plan(self, workspace: EmptyWorkspace, nbytes: int) -> ReferencePlan:
        return ReferencePlan(workspace.buffer.device)

    def append(self, args: AppendPagedKv) -> None:
        plain_attention.append(args)

    def decode_ops(self, device: str) -> DecodeOps | None:
        """Return our own on a CPU, where they are plain PyTorch, too."""
        return own_decode_ops() if device == "cpu" else None


BACKEND = Reference()
