"""Plans: how FlashInfer divides a batch, decided on the host, and launches that follow it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_llm_ops.contracts import Geometry, PageTable, register_plan
from compiled_llm_ops.flashinfer.append import readable
from compiled_llm_ops.flashinfer.planner import (
    PLAN_FIELDS,
    let_idle_blocks_repeat,
    overflow_explained,
    planner_arguments,
    row_lengths,
    with_blocks_for_tiles,
)
from compiled_llm_ops.flashinfer.splitting import worth_splitting
from compiled_llm_ops.flashinfer.versions import (
    HEAD_DIMS,
    QUERY_DTYPES,
    has_prefill_kernel,
    idle_blocks_read_the_plan,
    import_flashinfer,
)
from compiled_llm_ops.flashinfer.workspace import Workspace, power_of_two


class FlashInferPlan:
    """A plan for the prefills and extends that lie in one page table; see ``plans.AttentionPlan``.

    Call ``plan`` and the launches on one stream, or order the streams: the copy that ``plan`` issues overwrites what
    earlier launches read.
    """

    def __init__(
        self,
        geometry: Geometry,
        table: PageTable,
        *,
        rows: int,
        workspace: Workspace,
        static: bool,
        split: bool | None = None,
    ) -> None:
        """Register for ``table``; the first plan of a geometry builds or loads its kernels, later ones are cheap.

        Args:
            geometry: the attention group.
            table: device buffers at fixed addresses for exactly these rows, uploaded by the caller before a launch;
                every row has at least one page.
            rows: B.
            workspace: of the table's device.
            static: launches are captured in CUDA graphs, which replay after later calls of ``plan``. The number of
                rows is constant, and the first plan sets the largest number of tokens. Where it is not ``split``, the
                last row is best a short one: blocks without work repeat its first.
            split: whether blocks may share the keys of a row, which FlashInfer then makes them do wherever blocks are
                few; a static plan merges what they found even where they share none. None for what
                ``worth_splitting`` says of each batch, which a static plan has to be told.

        Raises:
            ValueError: the table does not have ``rows`` rows, a static plan is not told whether to split, or FlashInfer
                has no kernel for the geometry.
            ImportError: FlashInfer is missing.

        Source:
            FlashInfer ``BatchPrefillWithPagedKVCacheWrapper``, backend ``fa2`` (https://arxiv.org/abs/2501.01005).
        """
        _check_geometry(geometry)
        if table.indptr.shape[0] != rows + 1 or table.last_page_len.shape[0] != rows:
            raise ValueError(
                f"FlashInferPlan: {rows} rows need indptr [{rows + 1}] and last_page_len [{rows}]; got "
                f"[{table.indptr.shape[0]}] and [{table.last_page_len.shape[0]}]"
            )
        if static and split is None:
            raise ValueError("FlashInferPlan: split=None leaves it to each batch; static=True needs True or False")
        self.geometry = geometry
        self.table = table
        self._rows = rows
        self._static = static
        self._split = split
        self._workspace = workspace
        if not workspace.is_loading(geometry):
            workspace.wrapper(geometry)
        self._int_buffer = torch.empty(0, dtype=torch.uint8, device=workspace.device)
        self._tokens: int | None = None
        self._plan_info: Any = None
        self._frozen: tuple[int, ...] | None = None
        self._waiting: PageTable | None = None
        register_plan(table.indptr, rows, geometry, self)

    def plan(self, host: PageTable) -> None:
        """Decide how the kernels divide the batch, and queue the copy of that to the device. Never waits for it.

        While the kernels are being built, that is left to the first launch.

        Args:
            host: the table's columns on the host, int32, of exact sizes. Not copied to the device here, and free to
                be rewritten afterwards.

        Raises:
            ValueError: the columns are not on the host, have the wrong type or size, or a static plan got more
                tokens than its first one.
            RuntimeError: the float workspace is too small, a graph is being captured, or FlashInfer decided something
                else for a batch that a captured graph has fixed; the graph must not be replayed then.
        """
        _check_host(host, self._rows)
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("FlashInferPlan.plan: a CUDA graph is being captured; plan before the capture")
        if self._workspace.is_loading(self.geometry):
            self._waiting = PageTable(*(column.clone() for column in host))
        else:
            self._plan(host)

    def _plan(self, host: PageTable) -> None:
        self._waiting = None
        tokens = self._tokens_to_plan(host)
        if self._int_buffer.numel() < (needed := self._int_bytes(tokens)):
            # Never under a captured graph: the rows are constant, and so is the number of tokens.
            self._int_buffer = self._int_buffer.new_empty(power_of_two(needed))
        workspace, lengths = self._workspace, row_lengths(self.geometry, host)
        split = self._split
        if split is None:
            split = worth_splitting(self.geometry, np.diff(host.qo_indptr.numpy()), lengths, workspace.processors)
        arguments = planner_arguments(self.geometry, host, lengths, tokens=tokens, static=self._static, split=split)
        with workspace.staging(self._int_buffer.numel()) as pinned, overflow_explained(workspace.float_buffer):
            given = workspace.float_buffer, self._int_buffer, pinned, *arguments
            planner = workspace.wrapper(self.geometry)._cached_module
            if self._static and not split and idle_blocks_read_the_plan():
                places = self._plan_info if self._tokens == tokens else planner.plan(*given)
                let_idle_blocks_repeat(pinned, places, row=self._rows - 1)
            plan_info = planner.plan(*given)
        if self._static and not split:
            plan_info = with_blocks_for_tiles(plan_info, self.geometry, tokens, self._rows)
        self._check_frozen(plan_info)
        self._plan_info, self._tokens = plan_info, tokens

    def freeze(self) -> None:
        """Note that a graph has captured a launch: from now on ``plan`` raises if a number it baked in changes.

        Every number of a plan is baked in: the sizes and switches choose kernels and grids, and the offsets are added
        to the workspaces' addresses before the kernels get them.

        Raises:
            RuntimeError: the plan is not static, or nothing was planned yet.
        """
        if not self._static or self._plan_info is None:
            raise RuntimeError("FlashInferPlan.freeze: only a static plan that has planned a batch can be frozen")
        self._frozen = tuple(int(number) for number in self._plan_info)

    def run(
        self,
        query: Tensor,
        pages: Tensor,
        out: Tensor,
        lse: Tensor | None,
        scale: float,
        table: PageTable | None = None,
    ) -> None:
        """Launch attention on the current stream. Launch once before a capture, so that the kernels are loaded.

        Args:
            query: ``[T, H, D]``, ``geometry.dtype``, with the planned number of tokens.
            pages: ``[P, 2, K, S, D]``, ``geometry.kv_dtype``.
            out: ``[T, H, D]``, contiguous, written.
            lse: ``[T, H]`` float32, contiguous, written: the log-sum-exp in base 2. None where it is not wanted.
            scale: factor on the logits before the softmax.
            table: the page table as the launcher received it, which in a compiled graph may be the result of an
                earlier step of that graph; the plan's own where None.

        Raises:
            RuntimeError: nothing was planned yet.
            ValueError: shapes or dtypes do not fit what was planned.
        """
        if self._waiting is not None:
            self._plan(self._waiting)
        if self._plan_info is None:
            raise RuntimeError("FlashInferPlan.run: nothing was planned; call plan() before the launch")
        self._check_launch(query, pages, out, lse)
        wrapper = self._workspace.wrapper(self.geometry)
        wrapper._plan_info = self._plan_info
        wrapper._int_workspace_buffer = self._int_buffer
        wrapper._qo_indptr_last = self._tokens
        self._point_at(self.table if table is None else table)
        try:
            wrapper.run(
                q=readable(query),
                paged_kv_cache=pages,
                q_scale=scale,
                out=out,
                lse=lse,
                return_lse=lse is not None,
            )
        finally:
            self._point_at(self.table)  # a tensor that a graph made must not outlive its capture

    def _point_at(self, table: PageTable) -> None:
        """Let the wrapper read the page table there."""
        wrapper = self._workspace.wrapper(self.geometry)
        wrapper._qo_indptr_buf = table.qo_indptr
        wrapper._paged_kv_indptr_buf = table.indptr
        wrapper._paged_kv_indices_buf = table.indices
        wrapper._paged_kv_last_page_len_buf = table.last_page_len

    def _tokens_to_plan(self, host: PageTable) -> int:
        """Return T; in a static plan the first batch's, which the graph was captured with."""
        tokens = int(host.qo_indptr[-1])
        if not self._static or self._tokens is None:
            return tokens
        if tokens > self._tokens:
            raise ValueError(
                f"FlashInferPlan.plan: {tokens} tokens in a static plan whose first batch had {self._tokens}; "
                "plan the largest batch first"
            )
        return self._tokens

    def _int_bytes(self, tokens: int) -> int:
        """Return an upper bound of the bytes that FlashInfer plans for ``tokens`` tokens take.

        For each block of the launch up to three int32 and a bool, for each row and each token one int32 more, and
        some alignment. Split rows fill the device at most once (``max_grid_size`` in scheduler.cuh); rows that are not
        split take a block for each started tile of 16 or more (token, head of the group) pairs.
        """
        group = self.geometry.query_heads // self.geometry.kv_heads
        tiles = tokens * group // 16 + self._rows
        blocks = max(self._workspace.max_blocks // self.geometry.kv_heads, tiles) + 1
        return 13 * blocks + 4 * (self._rows + tokens) + 512

    def _check_frozen(self, plan_info: Any) -> None:
        if self._frozen is None:
            return
        changed = [
            f"{name} was {old} and is now {int(new)}"
            for name, old, new in zip(PLAN_FIELDS, self._frozen, plan_info, strict=True)
            if old != int(new)
        ]
        if changed:
            raise RuntimeError(
                f"FlashInferPlan.plan: a captured graph of {self._rows} rows no longer fits its plan: "
                f"{', '.join(changed)}; record the graph again before replaying it"
            )

    def _check_launch(self, query: Tensor, pages: Tensor, out: Tensor, lse: Tensor | None) -> None:
        geometry = self.geometry
        expected = (self._tokens, geometry.query_heads, geometry.head_dim)
        stored = (2, geometry.kv_heads, geometry.page_size, geometry.head_dim)
        if query.shape != expected or pages.shape[1:] != stored:
            raise ValueError(
                f"FlashInferPlan.run: planned for query {expected} and pages [P, {', '.join(map(str, stored))}]; got "
                f"{tuple(query.shape)} and {tuple(pages.shape)}"
            )
        if not out.is_contiguous() or (lse is not None and not lse.is_contiguous()):
            raise ValueError("FlashInferPlan.run: out and lse must be contiguous")


# ---- FlashInfer's planner


# ---- differences between FlashInfer's versions


# ---- around them


def _check_geometry(geometry: Geometry) -> None:
    if geometry.query_heads % geometry.kv_heads:
        raise ValueError(f"{geometry.query_heads} query heads are no multiple of {geometry.kv_heads} kv heads")
    if geometry.head_dim not in HEAD_DIMS:
        raise ValueError(f"FlashInfer has no kernel for head size {geometry.head_dim}; pad it to padded_head_dim()")
    if geometry.dtype not in QUERY_DTYPES:
        raise ValueError(f"FlashInfer has no kernel for {geometry.dtype} queries; use torch.bfloat16 or torch.float16")
    if not has_prefill_kernel(geometry.head_dim):
        raise ValueError(
            f"FlashInfer {import_flashinfer().__version__} has no kernel for head size {geometry.head_dim}; "
            'pip install "flashinfer-python>=0.7,<0.8"'
        )


def _check_host(host: PageTable, rows: int) -> None:
    """The planner reads the columns by address and trusts their place, type and size."""
    for name, length in (("qo_indptr", rows + 1), ("indptr", rows + 1), ("last_page_len", rows)):
        column = getattr(host, name)
        if column.device.type != "cpu" or column.dtype != torch.int32 or column.shape != (length,):
            raise ValueError(
                f"FlashInferPlan.plan: {name} must be int32 [{length}] on the host; got {column.dtype} "
                f"{list(column.shape)} on {column.device}"
            )
        if not column.is_contiguous():
            raise ValueError(f"FlashInferPlan.plan: {name} must be contiguous")
