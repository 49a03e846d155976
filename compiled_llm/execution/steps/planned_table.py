"""The page table of decode steps for a backend that plans them: one list of the rows' pages."""

# Shapes: B rows of a bucket, each with one new token.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.inputs import PlannedRows
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.kvcache.memory import mark_columns, mark_static
from compiled_llm.kvcache.pool import NULL_PAGE
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.table import HostTable, build_table


class PlannedTable:
    """The table for the largest batch, and its views and plans for each bucket."""

    def __init__(self, state: RunnerState, planner: Planner) -> None:
        self._planner, self._staging = planner, state.staging
        self._page_size = state.config.page_size
        max_rows, device = state.config.max_batch_size, state.device
        entries = max_rows * state.slots.pages_each
        with torch.inference_mode(False):
            self._indptr = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
            self._indices = mark_static(torch.zeros(entries, dtype=torch.int32, device=device))
            self._last_page_len = torch.zeros(max_rows, dtype=torch.int32, device=device)
            self._rows = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._views: dict[StepKey, tuple[Tensor, Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        return sum(own.nbytes for own in (self._indptr, self._indices, self._last_page_len, self._rows))

    def of(self, step: StepKey) -> PlannedRows:
        """Return the table and plans of a bucket, always the same tensors."""
        if step not in self._views:
            rows = step.rows
            whole = (self._indptr[: rows + 1], self._last_page_len[:rows], self._rows[: rows + 1])
            mark_columns(whole, rows)
            self._views[step] = whole
        indptr, last_page_len, qo_indptr = self._views[step]
        return PlannedRows(indptr, self._indices, last_page_len, qo_indptr, self._planner.for_decode(step))

    def of_padding(self, step: StepKey) -> PlannedRows:
        """Plan a bucket that has no rows now; return a table of padding, and leave that of the rows as it is."""
        # All buckets share the rows' table: a step that reads it writes to their pages, and advances it.
        table = self._on_host([], step)
        self._planner.plan_decode(table, step)
        indptr, last_page_len = own = self._staging.to_device([table.indptr, table.last_page_len])
        mark_columns(own, step.rows)
        indices = mark_static(torch.full_like(self._indices, NULL_PAGE))  # as many: their number is built in
        return self.of(step)._replace(indptr=indptr, indices=indices, last_page_len=last_page_len)

    def lay_out(self, rows: Sequence[Row], step: StepKey) -> None:
        """Write and plan the table of rows that have grown by the token that they are about to feed in."""
        table = self._on_host(rows, step)
        self._staging.upload(
            [
                (table.indptr, self._indptr),
                (table.indices, self._indices),
                (table.last_page_len, self._last_page_len),
            ]
        )
        self._planner.plan_decode(table, step)

    def _on_host(self, rows: Sequence[Row], step: StepKey) -> HostTable:
        return build_table(rows, [1] * len(rows), self._page_size, step.rows)
