"""The tables of decode steps that a backend plans, and that read the pages which rows share once for all of these rows.

Shapes: B rows of a bucket, R runs, M members of all runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.inputs import PlannedRows, PlannedRuns
from compiled_llm.execution.decode.planned_table import PlannedTable, TableColumns
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.state.decode_buffers import mark_columns
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.kvcache.memory import mark_static
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.table import HostTable, Span, build_table
from compiled_llm_ops.attention.cascade.tables import SharedRun, planned_cascade_tables
from compiled_llm_ops.contracts import CASCADE_LEVELS, CASCADE_RUNS, planned_members


class _OnHost(NamedTuple):
    """All that is written of a step.

    Attributes:
        own: the pages that each row has alone.
        runs: those that several have.
        whole: all pages; None if no layer has a window.
        columns: ``shared_lengths``, ``members`` and ``merge_parts``, flat.
    """

    own: HostTable
    runs: HostTable
    whole: HostTable | None
    columns: tuple[NDArray[np.int32], ...]


class PlannedCascadeTable:
    """The tables for the largest batch, and their views and plans for each bucket."""

    def __init__(self, state: RunnerState, planner: Planner, whole: PlannedTable) -> None:
        """``whole`` has the pages that layers with a window read."""
        self._planner, self._whole, self._own = planner, whole, TableColumns(state)
        self._staging, self._page_size, self._groups = state.staging, state.config.page_size, state.pool.groups
        max_rows, device = state.config.max_batch_size, state.device
        entries = max_rows * state.slots.pages_each + CASCADE_RUNS
        sizes = (max_rows, planned_members(max_rows), CASCADE_LEVELS * 3 * max_rows)
        with torch.inference_mode(False):
            self._columns = tuple(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
            starts = (torch.zeros(CASCADE_RUNS + 1, dtype=torch.int32, device=device) for _ in range(2))
            self._qo_indptr, self._indptr = map(mark_static, starts)
            self._indices = tuple(
                mark_static(torch.zeros(entries, dtype=torch.int32, device=device)) for _ in range(self._groups)
            )
            full = torch.full((CASCADE_RUNS,), self._page_size, dtype=torch.int32, device=device)
            self._last_page_len = mark_static(full)
        self._views: dict[StepKey, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        own = (*self._columns, self._qo_indptr, self._indptr, *self._indices, self._last_page_len)
        return self._own.nbytes + sum(column.nbytes for column in own)

    def of(self, step: StepKey) -> PlannedRows:
        """Return the tables and plans of a bucket, always the same tensors."""
        if step not in self._views:
            lengths, members, parts = self._columns
            of_parts = parts.view(-1, CASCADE_LEVELS, 3)[: step.rows]
            views = (lengths[: step.rows], members[: planned_members(step.rows)], of_parts)
            mark_columns(views, step.rows)
            self._views[step] = views
        lengths, members, parts = self._views[step]
        table = (self._qo_indptr, self._indptr, self._indices, self._last_page_len, parts)
        plans = self._planner.for_decode(step)
        whole = self._whole.columns.of(step, plans) if self._planner.has_windows else None
        runs = PlannedRuns(lengths, members, *table, self._planner.for_runs(step), whole)
        return self._own.of(step, plans)._replace(runs=runs)

    def plan_padding(self, step: StepKey) -> None:
        """Plan a bucket that has no rows now, and leave the tables as they are."""
        own, runs, whole, _ = self._on_host((), [], step)
        self._planner.plan_cascade(own, runs, whole, step)

    def lay_out(self, runs: Sequence[SharedRun], rows: Sequence[Row], step: StepKey) -> None:
        """Write and plan the tables of rows that have grown by the tokens that they are about to feed in."""
        own, shared, whole, columns = self._on_host(runs, rows, step)
        self._own.write(own)
        self._staging.upload(
            [
                *zip(columns, self._columns, strict=True),
                (shared.qo_indptr, self._qo_indptr),
                (shared.indptr, self._indptr),
                *zip(shared.indices, self._indices, strict=True),
            ]
        )
        if whole is not None:
            self._whole.columns.write(whole)
        self._planner.plan_cascade(own, shared, whole, step)

    def _on_host(self, runs: Sequence[SharedRun], rows: Sequence[Row], step: StepKey) -> _OnHost:
        size, groups = self._page_size, self._groups
        tables = planned_cascade_tables(runs, step.rows)
        shared = zip(rows, tables.shared_pages.tolist(), strict=False)  # not of padding
        own = [Span(row.pages[pages * groups :], row.length - pages * size) for row, pages in shared]
        spans = [_span(rows[run.rows[0]], run, size, groups) for run in tables.runs]
        # Where members are in no run, they read a null page, and nothing is merged of it.
        spans += [Span.null(size, size, groups)] * (CASCADE_RUNS - len(spans))
        return _OnHost(
            build_table(own, [1] * len(own), size, step.rows, groups=groups),
            build_table(spans, tables.queries.tolist(), size, CASCADE_RUNS, groups=groups),
            self._whole.table(rows, step) if self._planner.has_windows else None,
            (tables.shared_pages * np.int32(size), tables.members, tables.merge_parts.reshape(-1)),
        )


def _span(row: Row, run: SharedRun, page_size: int, groups: int) -> Span:
    """Return the pages of a run, which each of its rows has."""
    end = run.first_page + run.pages
    return Span(row.pages[run.first_page * groups : end * groups], run.pages * page_size)
