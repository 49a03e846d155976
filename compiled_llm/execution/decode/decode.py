"""Decode steps over buffers at fixed addresses, one bucket of rows each, and whose rows are in them.

Shapes: B rows of a bucket, q new tokens of each, T = B * q, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from compiled_llm.compat.torch.dynamo import graph_count
from compiled_llm.compat.torch.profiler import is_profiling
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.inputs import DecodeInputs
from compiled_llm.compilation.program_list import WITH_STATES, program_for
from compiled_llm.execution.decode.cascade_table import CascadeTable
from compiled_llm.execution.decode.launch import BoundProgram, Launch
from compiled_llm.execution.decode.planned_table import PlannedTable
from compiled_llm.execution.graphs.dispatcher import Dispatch, Dispatcher
from compiled_llm.execution.graphs.graph_manager import GraphManager
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.reporting.events import UploadCause
from compiled_llm.execution.reporting.progress import TaskNumber
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.kvcache.row import Row
from compiled_llm_ops.attention.cascade.tables import SharedRun
from compiled_llm_ops.protocol import own_decode_ops

logger = logging.getLogger("compiled_llm.uploads")

# Cudagraph trees run a new shape once as it is, capture it on the second call and replay it from the third.
_CALLS_TO_CAPTURE = 3

# Inductor chooses the blocks of its kernels for the rows that it sees first, and keeps them for all numbers of rows. On
# an H200, those chosen for 64 rows are up to 2 % faster than those for 2 from 64 rows on, and not slower with fewer.
_ROWS_TO_COMPILE = 64


class BatchOwner(Protocol):
    """Whose rows are in the decode buffers."""

    def displace(self) -> None:
        """Other rows are in the buffers from now on."""


class Decode:
    """The decode steps of one model.

    Attributes:
        dispatcher: picks the step that runs.
        follows_tokens: whether steps are planned, again for each token.
    """

    def __init__(
        self, state: RunnerState, graph_manager: GraphManager, planner: Planner, dispatcher: Dispatcher
    ) -> None:
        self._state = state
        self._graph_manager = graph_manager
        self.dispatcher = dispatcher
        self._table = state.step_table
        ops = state.decode_buffers.ops
        plain = state.device.type == "cpu" and ops is not None and ops.attend is own_decode_ops().attend
        self._plain = plain and not graph_manager.cuda_graphs.ours  # a replay repeats ops, and nothing between them
        self._planned = PlannedTable(state, planner) if planner.decodes else None
        self._cascade = None if state.cascade is None else CascadeTable(state)
        self._cuda_graphs = graph_manager.cuda_graphs
        self._owner: weakref.ref[BatchOwner] | None = None
        self._largest = dispatcher.decode_of(state.config.max_batch_size)
        self._table.anchors["decode"] = [self._largest]
        self._max_planned, self.follows_tokens = planner.max_tokens, planner.follows_tokens

    def step_of_several(self, rows: int, new_tokens: int) -> StepKey:
        """Return the smallest step of several new tokens a row; ValueError if the backend has none."""
        step, ops = self.dispatcher.decode_of(rows, new_tokens_per_row=new_tokens), self._state.decode_buffers.ops
        if ops is not None and not ops.several:
            raise ValueError(
                f"backend={self._state.config.backend!r} decodes one new token of each row at a time, not "
                f"{new_tokens}; feed them one by one"
            )
        if ops is None and step.tokens > self._max_planned:
            raise ValueError(
                f"{new_tokens} new tokens for each of {step.rows} rows are more than the {self._max_planned} that can "
                "be planned; wrap with a larger prefill_tokens"
            )
        if self._state.states:
            raise ValueError(
                f"{new_tokens} new tokens for each row: a step of recurrent layers has one; feed them one by one"
            )
        scores = self._state.scores
        if scores is not None and scores.scores.of_one_row:
            raise ValueError(
                f"{new_tokens} new tokens for each row: an indexer chooses the blocks that the newest one reads; feed "
                "them one by one"
            )
        if scores is not None and (needed := scores.of_decode(step.rows, new_tokens)) > scores.limit:
            raise ValueError(
                f"{new_tokens} new tokens for each of {step.rows} rows need {needed} bytes for an indexer's scores, "
                f"more than the {scores.limit} that there are; feed in fewer at a time"
            )
        return step

    def is_ready(self, step: StepKey) -> bool:
        """Return whether a step is compiled, and on CUDA captured."""
        return self._table.state(step) == self._table.at_best

    @property
    def wanted_buckets(self) -> list[int]:
        """The ready buckets without the one in which only smaller ones have run."""
        return [step.rows for step in self._table.at_once("decode") if not self._table.entries[step].spare]

    def ready(
        self,
        wanted: StepKey,
        waiting: int = 0,
        number: TaskNumber | None = None,
        anchors: bool = True,
        exact: bool = False,
    ) -> Launch:
        """Return the launch of a decode step; compile it and capture its graph first, if that is needed.

        A call does not wait for a CUDA graph alone: its step runs in the next larger one that is ready, or if there
        is none or it has to be exact, is launched as it is; the graph is captured while later steps run.

        Args:
            wanted: the step, of B rows.
            waiting: how many rows the call has that waits for it.
            number: its number among all that is prepared, to be shown.
            anchors: if the program of several rows is compiled now, capture the largest step, too, in which any can
                run.
            exact: run in no other step; if others have to make room for its CUDA graph, capture it now.
        """
        manager, table = self._graph_manager, self._table
        looked = manager.look_if_due()
        if (entry := table.entries.get(wanted)) is not None:
            entry.spare = False
            if entry.state == table.at_best and entry.looked == table.look:
                return self._launch_of(wanted, wanted)
        if manager.eager:
            table.compiled(wanted)
            return self._launch_of(wanted, wanted)
        if (dispatch := self._dispatch(wanted, waiting > 0, looked, exact)) is not None:
            manager.want_padded(wanted, dispatch, functools.partial(self._begin_capture, wanted))
            return self._launch_of(wanted, dispatch.step)
        self.claim(None)
        first = self._is_first(wanted)
        self._prepare(wanted, waiting, number, first)
        if first and anchors and not (wanted.cascade or wanted.states):
            self.capture_anchors(only_with_room=exact)
            if table.state(wanted) == "evicted":  # the largest has taken the only room
                return self._launch_of(wanted, self._largest)
        return self._launch_of(wanted, wanted)

    def _launch_of(self, wanted: StepKey, key: StepKey) -> Launch:
        """Return the launch of ``key``, which is valid, in place of ``wanted``."""
        graphs, entry = self._cuda_graphs, self._table.get(key)
        captures = graphs.ours and entry is None
        missed = self._table.missed if captures or key != wanted else None
        return Launch(
            wanted,
            key,
            entry,
            self._program(key),
            self._graph_manager.events,
            missed,
            self._state.page_watch,
            functools.partial(self._want_capture, key) if captures else None,
            alone=not graphs.background_captures,
        )

    def _want_capture(self, step: StepKey, outputs: StepOutputs) -> None:
        self._cuda_graphs.want(step, functools.partial(self._capture, step, outputs))

    def _program(self, step: StepKey) -> BoundProgram:
        manager = self._graph_manager
        in_trees = manager.programs.in_trees
        return BoundProgram(
            lambda: manager.programs.prepared(manager.arguments(self._inputs(step))),
            self._state.facts.attention.paged,
            guarded=self._cuda_graphs.ours or in_trees,
            in_trees=in_trees,
        )

    def _dispatch(self, step: StepKey, waits: bool, looked: bool, exact: bool) -> Dispatch | None:
        """Return what runs now, and is still valid; None if the step has to be compiled or captured first.

        ``looked`` says whether the model has been looked at for this step.
        """
        manager = self._graph_manager
        while True:
            dispatch = self.dispatcher.dispatch(step, exact)
            if dispatch.how == "compile":
                if not looked and self._table.state(step) in ("missing", "stale"):
                    manager.check_model()
                    looked = True
                if not (waits and self.dispatcher.captures and manager.can_launch(step, self._inputs(step))):
                    return None
            elif dispatch.how == "capture" or not (waits or self.is_ready(step)):
                return None
            elif dispatch.how == "launch" or manager.is_valid(dispatch.step):
                return dispatch

    def compile(self, step: StepKey) -> None:
        """Compile a decode step, if its program is not yet compiled; its CUDA graph is captured once it is wanted."""
        manager = self._graph_manager
        manager.check_model()
        if not manager.eager and not manager.can_launch(step, self._inputs(step)):
            self.claim(None)
            self._prepare(step, 0, None, self._is_first(step), captures=False)

    def capture_anchors(self, only_with_room: bool = True) -> None:
        """Capture the largest step, so that none waits for a smaller one; ``only_with_room`` evicts no other."""
        ready = self._table.at_once("decode")
        missing = self.dispatcher.captures and ready and ready[-1].rows > 1 and self._largest not in ready
        if missing and not (only_with_room and self._table.full):
            self._prepare(self._largest, 0, None, False)
            self._table.entry(self._largest).spare = True

    def _begin_capture(self, step: StepKey) -> None:
        """Begin to capture a step that may never have run, over rows of padding."""
        if self._planned is not None:
            self._planned.plan_padding(step)
        self._capture(step, None)

    def _capture(self, step: StepKey, like: StepOutputs | None, background: bool = True) -> None:
        self._graph_manager.capture(step, self._inputs(step), like, background=background)

    def _prepare(
        self, step: StepKey, waiting: int, number: TaskNumber | None, first: bool, captures: bool = True
    ) -> None:
        """Compile a step, the ``first`` with the rows that suit all, and capture it."""
        graph_manager, new = self._graph_manager, step.new_tokens_per_row
        several = f", {new} tokens each" if new > 1 else ", shared pages read once" if step.cascade else ""
        several += WITH_STATES * step.states
        what = f"decode bucket {step.rows}{several}"
        waiting = 0 if self._table.entry(step).losses else waiting
        program = program_for(self._inputs(step)).name
        shown = f"decode, {'1 row' if step.rows == 1 else f'{step.rows} rows'}{several}"
        with graph_manager.preparing(what, waiting, program, shown, number), self._cuda_graphs.accounted(what):
            suiting = self.dispatcher.decode_of(min(_ROWS_TO_COMPILE, self._largest.rows))
            if first and step.rows < suiting.rows:
                self._launch_padding(StepKey.decode(suiting.rows, cascade=step.cascade)._replace(states=step.states))
            for _ in range(_CALLS_TO_CAPTURE - 1 if graph_manager.programs.in_trees else 0):
                self._launch_padding(step)
            outputs = self._launch_padding(step)
            graph_manager.programs.warn_if_nothing_matched(self._state.facts.model)
            self._table.compiled(step)
            if captures and self._cuda_graphs.ours:
                self._capture(step, outputs, background=False)

    def _is_first(self, step: StepKey) -> bool:
        """Whether this one compiles a program of several rows, on CUDA, where its size does not stay built in."""
        programs = self._graph_manager.programs
        on_cuda = self._cuda_graphs.ours or (self._state.device.type == "cuda" and not programs.in_trees)
        if not on_cuda or step.rows == 1 or step.new_tokens_per_row > 1:
            return False
        compiled = programs.functions.get(program_for(self._inputs(step)).name)
        return compiled is None or not graph_count(compiled)

    def _launch_padding(self, step: StepKey) -> StepOutputs:
        self.place([], step, "bucket_prepared")
        self._state.arena.flush()
        return self._program(step)()

    def claim(self, owner: BatchOwner | None) -> None:
        """Hand the decode buffers to ``owner``, and displace the previous one."""
        previous = self._owner() if self._owner is not None else None
        if previous is not None and previous is not owner:
            previous.displace()
        self._owner = None if owner is None else weakref.ref(owner)

    def owned_by(self, owner: BatchOwner) -> bool:
        return self._owner is not None and self._owner() is owner

    @property
    def table_bytes(self) -> int:
        """Size of the page table of planned steps, and of the tables of shared pages, in bytes."""
        tables = (self._planned, self._cascade)
        return sum(table.nbytes for table in tables if table is not None)

    @property
    def follows_pages(self) -> bool:
        """Whether steps are planned, again whenever a row enters a page."""
        return self._planned is not None

    def place(self, rows: Sequence[Row], step: StepKey, cause: UploadCause, runs: Sequence[SharedRun] = ()) -> None:
        """Put rows, already grown by the tokens that they are about to feed in, in the decode buffers.

        Their slots have their page numbers; the rest of the bucket becomes padding. ``runs`` are the pages that they
        share, of a step that reads these once.
        """
        self._state.decode_buffers.place(rows, step)
        self._written(rows, step, cause, runs)

    def stay(
        self, rows: Sequence[Row], step: StepKey, cause: UploadCause, runs: Sequence[SharedRun], regrouped: bool
    ) -> None:
        """Keep rows at their batch indices although their pages have changed; otherwise as ``place``.

        ``regrouped`` says whether ``runs`` are others than those of the step before.
        """
        self._state.decode_buffers.place_padding(len(rows), step)
        self._written(rows, step, cause, runs, regrouped)

    def _written(
        self, rows: Sequence[Row], step: StepKey, cause: UploadCause, runs: Sequence[SharedRun], regrouped: bool = True
    ) -> None:
        if self._planned is not None:
            self._planned.lay_out(rows, step)
        elif step.cascade and regrouped:
            assert self._cascade is not None, "only with its tables are there such steps"
            self._cascade.lay_out(runs, rows, step)
        self._graph_manager.events.uploads[cause] += 1
        logger.debug("decode bucket %d: %d rows written: %s", step.rows, len(rows), cause)

    def feed(self, rows: int, step: StepKey, tokens: Tensor) -> None:
        """Let the first rows in the decode buffers feed in ``tokens`` ``[rows]`` or ``[rows, q]``, on the device."""
        self._state.arena.flush()
        inputs = self._state.decode_buffers.of(step)
        if inputs.fed is not None:
            inputs.fed[:rows].copy_(tokens)
        else:
            self._state.slots.tables.next_token.index_copy_(0, inputs.slots[:rows], tokens.long())

    def go_back(self, step: StepKey, sampled: Tensor, accept: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Let rows forget the last tokens of a step that has run, on the device, as many as do not count.

        Args:
            step: of q tokens a row.
            sampled: ``[rows, q]`` int64, after each of them.
            accept: returns ``[rows]``, how many count.

        Returns:
            ``[rows]`` int64 how many count, and the token that each row goes on with.
        """
        counts = accept(sampled.clone()).clamp(1, step.new_tokens_per_row).long()  # beyond are others' pages
        if counts.shape != sampled.shape[:1]:
            raise ValueError(f"accept: one number for each of {len(sampled)} rows is needed; got {[*counts.shape]}")
        inputs, rows = self._state.decode_buffers.of(step), len(sampled)
        next_tokens = sampled.gather(1, counts[:, None] - 1)[:, 0]
        if (watch := self._state.page_watch) is not None:
            assert inputs.fed is not None, "several tokens were known"
            watch.go_back(inputs.slots[:rows], inputs.fed[:rows], counts, inputs.lengths[:rows])
        inputs.positions[:rows].add_(counts - step.new_tokens_per_row)
        inputs.lengths[:rows].add_(counts - step.new_tokens_per_row)
        self._state.slots.tables.next_token.index_copy_(0, inputs.slots[:rows], next_tokens)
        return counts, next_tokens

    def _inputs(self, step: StepKey) -> DecodeInputs:
        inputs = self._state.decode_buffers.of(step)
        if self._plain and self._graph_manager.programs.interpreted and not is_profiling():  # a profile names ops
            inputs = inputs._replace(shares_places=True)
        if self._state.page_watch is not None:
            inputs = inputs._replace(page_check=self._state.page_watch.inputs)
        if step.cascade:
            assert self._cascade is not None, "only with its tables are there such steps"
            return inputs._replace(cascade=self._cascade.of(step))
        return inputs if self._planned is None else inputs._replace(planned=self._planned.of(step))
