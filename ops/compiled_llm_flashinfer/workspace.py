"""What FlashInfer's wrappers have in common: a workspace that names the device, and tables that plans write."""

# With CUDA graphs, tables have fixed addresses, those of the user's buffers: captured launches follow what is written
# to them, by ``plan`` or by the user.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch import Tensor

from compiled_llm_flashinfer.arguments import DataTypes, Scale, fp8_scales, results_like
from compiled_llm_flashinfer.attend import BatchTable, Logits, attend, logits

_Parameters = ParamSpec("_Parameters")


class Planned:
    """A wrapper that is planned before it runs; its workspace is not written: it names the device."""

    def __init__(self, float_workspace_buffer: Tensor, use_cuda_graph: bool) -> None:
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans write to the user's buffers."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Name another device's workspace. Neither is written, nor ``int_workspace_buffer`` read."""
        self.device = float_workspace_buffer.device

    def end_forward(self) -> None:
        """Do nothing; FlashInfer has it for old code."""

    def _buffer(self, name: str, buffer: Tensor | None) -> Tensor | None:
        """Return the user's buffer for a table, None without CUDA graphs; ValueError if these have none."""
        if not self._use_cuda_graph:
            return None
        if not isinstance(buffer, Tensor):
            raise ValueError(f"{name} must be a tensor with use_cuda_graph=True; got {buffer!r}")
        return buffer

    def _place(self, non_blocking: bool, **tables: tuple[Tensor, Tensor | None]) -> list[Tensor]:
        """Return tables as their buffers, into which they are written, or else on the device, by the buffers' names."""
        # A table may be shorter than its buffer, which is returned whole; ValueError if one is longer, and nothing is
        # written.
        for name, (table, buffer) in tables.items():
            if buffer is not None and len(table) > len(buffer):
                raise ValueError(f"{name} has room for {len(buffer)} entries; got {len(table)}: make it longer")
        return [self._placed(table, buffer, non_blocking) for table, buffer in tables.values()]

    def _placed(self, table: Tensor, buffer: Tensor | None, non_blocking: bool) -> Tensor:
        if buffer is None:
            return table.to(self.device, non_blocking=non_blocking)
        if table is buffer:
            return buffer
        # From pageable memory, a copy that goes on might read what the caller has changed.
        buffer[: len(table)].copy_(table, non_blocking=non_blocking and table.device == buffer.device)
        return buffer


def as_index(table: Tensor) -> Tensor:
    """Return a table of offsets or page numbers as int32 or int64, which ops read."""
    return table if table.dtype in (torch.int32, torch.int64) else table.to(torch.int32)


def without_lse(method: Callable[_Parameters, tuple[Tensor, Tensor]]) -> Callable[_Parameters, Tensor]:
    """Return a method with the arguments of one that also returns the log-sum-exp."""

    @functools.wraps(method, assigned=())
    def forward(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> Tensor:
        """Deprecated: ``forward_return_lse`` without the log-sum-exp."""
        return method(*args, **kwargs)[0]

    return forward


class PlannedRun(Planned):
    """A wrapper whose ``run`` is one call of ``attend``."""

    run: Callable[..., Any]
    _table: BatchTable | None = None
    _types: DataTypes
    _how: Logits
    _heads: int

    def run_return_lse(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """``run`` with ``return_lse=True``."""
        out, lse = self.run(*args, **kwargs, return_lse=True)
        return out, lse

    def _plan_logits(self, **how: Any) -> None:
        """Plan how logits are made anew, for ``forward``; RuntimeError if nothing was planned."""
        if self._table is None:
            raise RuntimeError("call plan() before forward()")
        self._how = logits(self._heads, self.device, one_order=self._how.one_order, **how)

    def _planned_table(self, window_left: int | None) -> BatchTable:
        """Return where rows lie; RuntimeError if nothing was planned, ValueError for another window."""
        if self._table is None:
            raise RuntimeError("call plan() before run()")
        if window_left is not None and window_left != self._how.window_left:
            raise ValueError(f"window_left must be {self._how.window_left}, as planned; got {window_left}")
        return self._table

    def _attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        table: BatchTable,
        out: Tensor | None,
        lse: Tensor | None,
        return_lse: bool,
        result: torch.dtype,
        args: tuple[Scale, ...],
        *,
        q_scale: Scale,
        k_scale: Scale,
        v_scale: Scale,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return what ``run`` returns, whose arguments the others are, in ``out`` and ``lse`` where they are given."""
        scale_q, scale_k, scale_v = fp8_scales(args)
        out, lse = results_like(out, lse, return_lse, (*q.shape[:2], values.shape[3]), result, q)
        attend(
            q, keys, values, out, lse, table, self._how,
            logit_scales={"q_scale": q_scale, "k_scale": k_scale, "scale_q": scale_q, "scale_k": scale_k},
            value_scales={"v_scale": v_scale, "scale_v": scale_v},
        )  # fmt: skip
        return (out, lse) if return_lse and lse is not None else out


class PlannedPrefill(PlannedRun):
    """A wrapper of prefill, whose plans may have masks."""

    _tokens: int

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool,
        custom_mask_buf: Tensor | None,
        mask_indptr_buf: Tensor | None,
    ) -> None:
        super().__init__(float_workspace_buffer, use_cuda_graph)
        self._mask_buffers = (custom_mask_buf, mask_indptr_buf) if use_cuda_graph else (None, None)
        self._rows = -1

    def _check_rows(self, rows: int, **tables: tuple[Tensor | None, int]) -> None:
        """Raise ValueError unless each table has an entry for each row, and as many more as are said."""
        for name, (table, more) in tables.items():
            if table is not None and len(table) != rows + more:
                raise ValueError(f"{name} must be [{rows + more}] for {rows} rows; got [{len(table)}]")
        if self._use_cuda_graph and self._rows not in (-1, rows):
            raise ValueError(f"with CUDA graphs the batch is always {self._rows}, as buffers are; got {rows}")

    def _place_with_mask(
        self, non_blocking: bool, mask: tuple[Tensor, Tensor] | None, **tables: tuple[Tensor, Tensor | None]
    ) -> list[Tensor | None]:
        """Return tables as ``_place`` does, then the mask and where its rows begin, None without one."""
        # With CUDA graphs, the buffer of a mask is read whether this plan has one or not, as FlashInfer does.
        if mask is None:
            return [*self._place(non_blocking, **tables), *self._mask_buffers]
        names = ("custom_mask_buf", "mask_indptr_buf")
        if self._use_cuda_graph:
            for name, buffer in zip(names, self._mask_buffers, strict=True):
                self._buffer(name, buffer)
        masks = {name: (own, buffer) for name, own, buffer in zip(names, mask, self._mask_buffers, strict=True)}
        return [*self._place(non_blocking, **tables, **masks)]

    def _planned(
        self, placed: list[Tensor | None], heads: int, qo_indptr: Tensor, types: DataTypes, how: Logits
    ) -> None:
        qo_indptr_buf, indptr, *rest = placed
        indices, last_page_len = rest[:-2] or (None, None)
        self._table = BatchTable(qo_indptr_buf, indptr, indices, last_page_len, *rest[-2:])
        self._heads = heads
        self._tokens = int(qo_indptr[-1])
        self._types = types
        self._how = how

    def _checked(self, q: Tensor, window_left: int | None) -> BatchTable:
        """Return where rows lie as ``_planned_table`` does; ValueError for other queries."""
        table = self._planned_table(window_left)
        # A graph has one shape for all batches: it is not to have another for each number of tokens.
        if not torch.compiler.is_dynamo_compiling() and q.shape[0] != self._tokens:
            raise ValueError(f"q must have {self._tokens} tokens, as planned with qo_indptr; got {tuple(q.shape)}")
        return table
