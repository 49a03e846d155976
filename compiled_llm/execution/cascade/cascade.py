"""When decode steps read the pages that rows share once for all of these rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compiled_llm.execution.cascade.shared_runs import SharedRuns
from compiled_llm.execution.cascade.tables import LEAST_KEYS, CascadeTable
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.kvcache.row import Row
from compiled_llm_ops.attention.cascade.rule import CascadeLayer, cascade_saves
from compiled_llm_ops.attention.cascade.tables import SharedRun
from compiled_llm_ops.contracts import CASCADE_QUERIES
from compiled_llm_ops.protocol import DecodeOps

if TYPE_CHECKING:
    from compiled_llm.execution.cascade import cascade as this
    from compiled_llm.execution.state.runner_state import CascadePart

    checked: CascadePart = this


class Cascade:
    """The decision for one model: ``cascade=True`` always, ``"auto"`` where attention is known to be faster."""

    tables = CascadeTable

    def __init__(self, layers: Sequence[CascadeLayer], page_size: int, longest: int, always: bool) -> None:
        """Decide for rows of up to ``longest`` tokens."""
        self._always = always
        self._layers = Counter(layers)
        self._page_size, self._longest = page_size, longest

    @classmethod
    def of(cls, state: RunnerState, ops: DecodeOps | None) -> Cascade | None:
        """Return None if no step reads shared pages once: it is not wanted, or ``"auto"`` has no kernel for it."""
        # The rule of ``"auto"`` was fitted on GPUs, so on a CPU it is off.
        config, wanted = state.config, state.config.cascade
        layers = zip(state.facts.layers, state.specs, strict=False)  # after them come specs of index keys
        known = [
            CascadeLayer(layer.query_heads, layer.kv_heads, layer.head_dim, spec.dtype.itemsize, layer.window_left >= 0)
            for layer, spec in layers
            if layer.kind.reads_shared_pages
        ]
        if wanted == "auto":
            has_kernel = ops is not None and bool(ops.joint) and state.dtype.itemsize == 2
            attending = [layer for layer in state.facts.layers if layer.kind.attends]
            fits = all(layer.query_heads // layer.kv_heads <= CASCADE_QUERIES for layer in attending)
            on_cuda, several = state.device.type == "cuda", config.max_batch_size > 1
            wanted = on_cuda and has_kernel and fits and bool(known) and several
        return cls(known, config.page_size, state.max_positions, config.cascade is True) if wanted else None

    def of_loop(self) -> RowsThatShare:
        return RowsThatShare(self, self._page_size)

    def pays(self, runs: Sequence[SharedRun], rows: int) -> bool:
        """Return whether a step of so many rows reads these runs once."""
        if self._always or not runs:
            return bool(runs)
        saved = (count * cascade_saves(runs, rows, self._page_size, layer) for layer, count in self._layers.items())
        return sum(saved) > 0

    def may_pay(self, rows: int) -> bool:
        """Return whether a step of so many rows reads shared pages once if all of them share as much as they can."""
        return rows > 1 and self.pays([SharedRun(tuple(range(rows)), 0, self._longest // self._page_size)], rows)


class RowsThatShare:
    """The runs of pages that rows of one loop begin with, and whether they are read once."""

    def __init__(self, cascade: Cascade, page_size: int) -> None:
        self._cascade, self._shared = cascade, SharedRuns(page_size, -(-LEAST_KEYS // page_size))
        self._found: Sequence[SharedRun] = ()
        self._pays = False

    def runs(self, rows: Sequence[Row]) -> Sequence[SharedRun]:
        """Return those that are read once; the page of a row's last token is in none: the next one may go there."""
        if len(rows) < 2:
            return ()
        found = self._shared.runs(rows)
        if found is not self._found:
            self._found, self._pays = found, self._cascade.pays(found, len(rows))
        return found if self._pays else ()


def sharing_of(state: RunnerState, ops: DecodeOps | None) -> Cascade | None:
    """Return when decode steps of a model read shared pages once; None for never."""
    return Cascade.of(state, ops)
