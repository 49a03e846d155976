"""Plain PyTorch behind the ops: no plan, no workspace, any head size and type; it waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm_ops import plain_attention
from compiled_llm_ops.contracts import FP8, AppendPagedKv, Geometry, PagedAttention, PlannedBatch
from compiled_llm_ops.protocol import CapturedLaunch, DecodeOps, Installation, NothingToBuild, own, own_decode_ops


class ReferencePlan:
    """An empty plan, since the kernels need none; see ``protocol.Plan``."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(16, dtype=torch.uint8, device=device)
        self.numbers = torch.zeros(0, dtype=torch.int64, device="cpu")
        own(self)

    def decide(self, batch: PlannedBatch) -> None: ...

    def launch(self, args: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        how = (args.scale, args.window_left, args.logits_soft_cap)
        result, result_lse = plain_attention.attend_row_by_row(
            args.query, args.pages, args.table, *how, lse is not None, args.key_scale, args.value_scale
        )
        out.copy_(result)
        if lse is not None and result_lse is not None:
            lse.copy_(result_lse)


class ReferenceWorkspace:
    """An empty workspace; see ``protocol.Workspace``."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    def load(self, geometry: Geometry) -> None: ...


class Reference:
    """See ``protocol.Backend``."""

    devices: tuple[str, ...] = ("cuda", "cpu")
    dtypes = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
    kv_dtypes = frozenset({FP8})
    capturable = False  # it reads lengths from the device
    uneven_heads = True
    rope_append = False  # it is to share no kernel with the others
    variants: tuple[int, ...] = (0,)
    installation: Installation = NothingToBuild()

    def missing_kernel(self, geometry: Geometry) -> str | None:
        return None

    def stored_head_dim(self, head_dim: int) -> int:
        return head_dim

    def best_variant(
        self, groups: Sequence[Geometry], queries: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> int:
        return 0

    def workspace_bytes(
        self, groups: Sequence[Geometry], device: torch.device, captured: CapturedLaunch | None = None
    ) -> int:
        return 0

    def plan_bytes(self, groups: Sequence[Geometry], device: torch.device, tokens: int, rows: int) -> int:
        return 0

    def workspace(self, device: torch.device, nbytes: int) -> ReferenceWorkspace:
        return ReferenceWorkspace(device)

    def new_plan(self, workspace: ReferenceWorkspace, nbytes: int) -> ReferencePlan:
        return ReferencePlan(workspace.buffer.device)

    def append(self, args: AppendPagedKv) -> None:
        plain_attention.append(args)

    def decode_ops(self, device: str) -> DecodeOps | None:
        """Return our own on a CPU, where they are plain PyTorch, too."""
        return own_decode_ops() if device == "cpu" else None


BACKEND = Reference()
