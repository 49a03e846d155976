"""What backends have in common whose kernels read the page table as it is then: plans and workspaces are empty."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compiled_llm_ops.contracts import Geometry, PlannedBatch
from compiled_llm_ops.protocol import CapturedLaunch, Installation, NothingToBuild


class EmptyPlan:
    """A plan that decides nothing; see ``protocol.Plan``. Each backend launches its own kernels."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(16, dtype=torch.uint8, device=device)
        self.numbers = torch.zeros(0, dtype=torch.int64, device="cpu")

    def decide(self, batch: PlannedBatch) -> None: ...


class EmptyWorkspace:
    """See ``protocol.Workspace``."""

    def __init__(self, device: torch.device) -> None:
        self.buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    def load(self, geometry: Geometry) -> None: ...


class Unplanned:
    """The part of ``protocol.Backend`` that is about plans."""

    variants: tuple[int, ...] = (0,)
    installation: Installation = NothingToBuild()

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

    def workspace(self, device: torch.device, nbytes: int) -> EmptyWorkspace:
        return EmptyWorkspace(device)
