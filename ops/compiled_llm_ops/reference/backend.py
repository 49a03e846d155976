"""Plain PyTorch behind the ops: no plan, no workspace, any head size and type; it waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from compiled_llm_ops import plain_attention
from compiled_llm_ops.contracts import AppendPagedKv, Geometry, PagedAttention, PlannedBatch
from compiled_llm_ops.protocol import Captured, own


class ReferencePlan:
    """A plan in which nothing is decided; see ``protocol.Plan``."""

    def __init__(self, device: torch.device) -> None:
        """Allocate a tensor with an address to be found by."""
        self.tensor = torch.zeros(16, dtype=torch.uint8, device=device)
        self.numbers = torch.zeros(0, dtype=torch.int64, device="cpu")
        own(self)

    def decide(self, batch: PlannedBatch) -> None:
        """Decide nothing."""

    def launch(self, args: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
        """Attend to one row after the other."""
        how = (args.scale, args.window_left, args.logits_soft_cap)
        result, result_lse = plain_attention.attend_row_by_row(
            args.query, args.pages, args.table, *how, lse is not None
        )
        out.copy_(result)
        if lse is not None and result_lse is not None:
            lse.copy_(result_lse)


class ReferenceWorkspace:
    """A workspace that holds nothing; see ``protocol.Workspace``."""

    def __init__(self, device: torch.device) -> None:
        """Allocate nothing."""
        self.buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    def load(self, geometry: Geometry) -> None:
        """Load nothing."""


class Reference:
    """See ``protocol.Backend``."""

    devices: tuple[str, ...] = ("cuda", "cpu")
    dtypes = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
    capturable = False  # it reads lengths from the device
    variants: tuple[int, ...] = (0,)

    def problems(self, builds: bool = True) -> list[str]:
        """Nothing can be missing."""
        return []

    def compiler(self) -> str | None:
        """Build nothing."""
        return None

    def find_kernels_in(self, folder: Path) -> None:
        """Look for nothing: there is nothing to build."""

    def kernels_built(self) -> int:
        """Return 0."""
        return 0

    def missing_kernel(self, geometry: Geometry) -> str | None:
        """Everything can be computed."""
        return None

    def stored_head_dim(self, head_dim: int) -> int:
        """Pad nothing."""
        return head_dim

    def best_variant(
        self, groups: Sequence[Geometry], queries: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> int:
        """There is one."""
        return 0

    def workspace_bytes(
        self, groups: Sequence[Geometry], device: torch.device, captured: Captured | None = None
    ) -> int:
        """Need none."""
        return 0

    def plan_bytes(self, groups: Sequence[Geometry], device: torch.device, tokens: int, rows: int) -> int:
        """Need none."""
        return 0

    def workspace(self, device: torch.device, nbytes: int) -> ReferenceWorkspace:
        """Return one that holds nothing."""
        return ReferenceWorkspace(device)

    def new_plan(self, workspace: ReferenceWorkspace, nbytes: int) -> ReferencePlan:
        """Return a plan."""
        return ReferencePlan(workspace.buffer.device)

    def append(self, args: AppendPagedKv) -> None:
        """Write one page slot for each token."""
        plain_attention.append(args)


BACKEND = Reference()
