"""FlashInfer as a backend; see ``protocol.Backend``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from compiled_llm_ops.contracts import SCALED_IN_KERNELS, AppendPagedKv, Geometry, PageTable
from compiled_llm_ops.contracts.devices import device_of
from compiled_llm_ops.flashinfer import hopper, install, mla
from compiled_llm_ops.flashinfer.append import append
from compiled_llm_ops.flashinfer.hopper import FA3, takes_fa3
from compiled_llm_ops.flashinfer.plan import FlashInferPlan
from compiled_llm_ops.flashinfer.planner import plan_bytes
from compiled_llm_ops.flashinfer.prebuilt import find_kernels_in, kernels_built
from compiled_llm_ops.flashinfer.splitting import SPLIT, WHOLE, captured_split_bytes, split_bytes, worth_splitting
from compiled_llm_ops.flashinfer.versions import QUERY_DTYPES, missing_kernel, padded_head_dim
from compiled_llm_ops.flashinfer.workspace import FlashInferWorkspace
from compiled_llm_ops.protocol import CapturedLaunch, DecodeOps, Installation, Launch


class FlashInferInstallation:
    """FlashInfer, and nvcc and ninja, with which it builds its kernels."""

    def problems(self, builds: bool = True) -> list[str]:
        return install.missing_for_cuda(builds)

    def compiler(self) -> str | None:
        """Return the nvcc that FlashInfer would run; None if its kernels are installed already built."""
        return None if install.has_built_kernels() else install.find_nvcc()

    def find_kernels_in(self, folder: Path) -> None:
        find_kernels_in(folder)

    def kernels_built(self) -> int:
        return kernels_built()

    def wait_for_builds(self) -> None:
        hopper.wait_for_builds()


class FlashInfer:
    """FlashInfer's wrappers of paged attention (``fa2``, ``fa3``, MLA), and ``append_paged_kv_cache``."""

    devices: tuple[str, ...] = ("cuda",)
    dtypes = frozenset(QUERY_DTYPES)
    kv_dtypes = SCALED_IN_KERNELS
    capturable = True
    kernels: Mapping[str, Launch] = FlashInferPlan.kernels
    rope_append = True
    schedules: tuple[int, ...] = (WHOLE, SPLIT, FA3)
    installation: Installation = FlashInferInstallation()

    def missing_kernel(self, geometry: Geometry) -> str | None:
        return mla.missing_kernel(geometry) if geometry.rope_size else missing_kernel(geometry)

    def stored_head_dim(self, head_dim: int) -> int:
        return padded_head_dim(head_dim)

    def best_schedule(
        self, groups: Sequence[Geometry], queries: Sequence[int], lengths: Sequence[int], device: torch.device
    ) -> int:
        """Choose ``fa3`` if it pays for all groups; else split if that pays for any."""
        if any(group.rope_size for group in groups):
            return WHOLE
        processors = device_of(device).processors
        if takes_fa3(groups, queries, lengths, device, processors):
            return FA3
        return SPLIT if any(worth_splitting(group, queries, lengths, processors) for group in groups) else WHOLE

    def workspace_bytes(
        self, groups: Sequence[Geometry], device: torch.device, captured: CapturedLaunch | None = None
    ) -> int:
        processors = device_of(device).processors
        if any(group.rope_size for group in groups):
            return max(mla.workspace_bytes(group, processors) for group in groups)
        if captured is None:
            return max(split_bytes(group, processors) for group in groups)
        if captured.schedule != SPLIT:
            return 0
        sizes = (captured_split_bytes(group, captured.tokens, captured.rows, processors) for group in groups)
        return max(sizes)

    def plan_bytes(self, groups: Sequence[Geometry], device: torch.device, tokens: int, rows: int) -> int:
        largest = max(plan_bytes(group, tokens, rows, device) for group in groups)
        return -(-largest // 256) * 256

    def workspace(self, device: torch.device, nbytes: int) -> FlashInferWorkspace:
        return FlashInferWorkspace(device, nbytes)

    def new_plan(self, workspace: FlashInferWorkspace, nbytes: int) -> FlashInferPlan:
        return FlashInferPlan(workspace, nbytes)

    def append(self, args: AppendPagedKv) -> None:
        table = PageTable(args.indptr, args.indptr, args.indices, args.last_page_len)
        append(args.key, args.value, args.pages, args.token_rows, args.token_positions, table)

    def decode_ops(self, device: str) -> DecodeOps | None:
        return None


BACKEND = FlashInfer()
