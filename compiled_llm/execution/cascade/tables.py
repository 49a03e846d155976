"""The tables of decode steps that read the pages which rows share once for all of these rows."""

# Shapes: B rows of a bucket, W work items.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.kvcache.memory import mark_columns, mark_static
from compiled_llm.kvcache.row import Row
from compiled_llm.model.sizes import attention_geometries
from compiled_llm_ops import cascade_attention, cascade_attention_lse, decode_attention, decode_attention_lse
from compiled_llm_ops.attention.cascade.contract import CASCADE_LEVELS
from compiled_llm_ops.attention.cascade.tables import SharedRun, cascade_tables
from compiled_llm_ops.contracts import DecodeAttention

LEAST_KEYS = 64
"""Keys of a run below which it is not worth a work item: about those that a program reads at a time."""

_ITEMS_OF_A_ROW, _LEAST_ITEMS = 2, 128
"""Work items that there is room for: each pair of rows may share something, and few rows something long."""

_PARTS_OF_A_ROW, _LEAST_PARTS = 8, 512
"""Partial results that there is memory for."""


class CascadeBatch(NamedTuple):
    """The pages that rows begin with together, and how reading is divided; the arguments of ``cascade_attention``."""

    shared_lengths: Tensor  # ``[B]`` int32, tokens of each row in pages that are shared
    members: Tensor  # ``[M]`` int32, rows
    work_items: Tensor  # ``[W, 6]`` int32
    merge_parts: Tensor  # ``[B, 3, 3]`` int32
    max_parts: int  # partial results that there is memory for

    def attend(self, arguments: DecodeAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
        """Read shared pages once; in a layer that chooses which it reads, each row reads its own."""
        if arguments.visible is not None:
            return decode_attention_lse(*arguments) if wants_lse else (decode_attention(*arguments), None)
        given: tuple[Any, ...] = (*arguments[:7], *self, *arguments[7:-1])  # all but ``visible``
        return cascade_attention_lse(*given) if wants_lse else (cascade_attention(*given), None)


class CascadeTable:
    """The tables for the largest batch, and their views for each bucket; without runs, rows read all for themselves."""

    def __init__(self, state: RunnerState) -> None:
        self._staging, self._slots = state.staging, state.slots
        self._page_size, max_rows = state.config.page_size, state.config.max_batch_size
        attending = [layer for layer in state.facts.layers if layer.kind.attends]
        geometries = attention_geometries(attending, self._page_size, state.dtype)
        self._kv_heads = min(geometry.kv_heads for geometry in geometries)
        self._heads = self._kv_heads * max(geometry.query_heads // geometry.kv_heads for geometry in geometries)
        on_cuda = state.device.type == "cuda"
        self._processors = torch.cuda.get_device_properties(state.device).multi_processor_count if on_cuda else 1
        self._max_items = max(_LEAST_ITEMS, _ITEMS_OF_A_ROW * max_rows)
        self._max_parts = max(_LEAST_PARTS, _PARTS_OF_A_ROW * max_rows)
        sizes = (max_rows, CASCADE_LEVELS * max_rows, 6 * self._max_items, 3 * CASCADE_LEVELS * max_rows)
        with torch.inference_mode(False):
            self._whole = tuple(torch.zeros(size, dtype=torch.int32, device=state.device) for size in sizes)
        self._views: dict[StepKey, CascadeBatch] = {}

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self._whole)

    def of(self, step: StepKey) -> CascadeBatch:
        """Return the tables of a bucket, always the same tensors."""
        if step not in self._views:
            self._views[step] = self._viewed(self._whole, step)
        return self._views[step]

    def of_padding(self, step: StepKey) -> CascadeBatch:
        """Return tables of padding, and leave those of the rows, which may be more than the step has, as they are."""
        whole = tuple(map(torch.zeros_like, self._whole))
        self._write(whole, (), (), step)
        return self._viewed(whole, step)

    def lay_out(self, runs: Sequence[SharedRun], rows: Sequence[Row], step: StepKey) -> None:
        """Write which pages of ``rows``, which have slots, are read together."""
        self._write(self._whole, runs, rows, step)

    def _viewed(self, whole: Sequence[Tensor], step: StepKey) -> CascadeBatch:
        shared_lengths, members, items, parts = whole
        of_rows = shared_lengths[: step.rows], parts.view(-1, CASCADE_LEVELS, 3)[: step.rows]
        mark_columns(of_rows, step.rows)
        any_rows = mark_static(members), mark_static(items.view(-1, 6))
        return CascadeBatch(of_rows[0], *any_rows, of_rows[1], self._max_parts)

    def _write(self, whole: Sequence[Tensor], runs: Sequence[SharedRun], rows: Sequence[Row], step: StepKey) -> None:
        starts = self._slots.of(rows, step.rows) * self._slots.pages_each
        paging = (self._page_size, self._heads, self._kv_heads, self._processors)
        tables = cascade_tables(runs, starts.tolist(), *paging, self._max_items, self._max_parts)
        self._staging.upload([(table.reshape(-1), column) for table, column in zip(tables, whole, strict=True)])
