"""Decode steps over buffers at fixed addresses, one bucket of rows each, and whose rows are in them.

Shapes: B rows of a bucket, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from compiled_llm.compat.torch.dynamo import graph_count
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.inputs import DecodeInputs
from compiled_llm.compilation.program_list import DECODE_MANY, program_for
from compiled_llm.execution.decode.decode_step import DecodeLaunch
from compiled_llm.execution.decode.planned_table import PlannedTable
from compiled_llm.execution.graphs.graph_manager import GraphManager
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.reporting.events import UploadCause
from compiled_llm.execution.state.decode_buffers import bucket_for
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.kvcache.row import Row

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
        ready: the steps, among others, that can be run at once; always the same set.
    """

    def __init__(self, state: RunnerState, graph_manager: GraphManager, planner: Planner) -> None:
        self._state = state
        self._graph_manager = graph_manager
        self._planned = PlannedTable(state, planner) if planner.decodes else None
        self._cuda_graphs = graph_manager.cuda_graphs
        self.ready = graph_manager.ready
        self._launchable: set[StepKey] = set()  # that were compiled when they were last missing
        self._spare: StepKey | None = None  # captured for others to run in, until a step wants it for itself
        self._owner: weakref.ref[BatchOwner] | None = None
        most = state.config.max_batch_size
        self._step_for = [StepKey.decode(bucket_for(rows, most)) for rows in range(most + 1)]
        self._largest = self._step_for[-1]
        state.cuda_graphs.anchors["decode"] = [self._largest]

    def step_for(self, rows: int) -> StepKey:
        """Return the smallest step that has room for so many rows."""
        return self._step_for[rows]

    @property
    def captures(self) -> bool:
        """Whether steps are captured while others run, so that calls wait for no more than compiling."""
        return self._cuda_graphs.ours

    @property
    def ready_steps(self) -> list[StepKey]:
        """Those that are compiled, and on CUDA captured, smallest first."""
        return self._graph_manager.ready_decodes

    @property
    def wanted_buckets(self) -> list[int]:
        """The ready buckets without the one in which only smaller ones have run."""
        return [step.rows for step in self.ready_steps if step != self._spare]

    def make_ready(
        self,
        step: StepKey,
        waiting: int = 0,
        unchanged: bool = False,
        number: str = "",
        anchors: bool = True,
        exact: bool = False,
    ) -> StepKey:
        """Compile decode for a bucket and capture its graph, if that has not happened yet or no longer holds.

        A call does not wait for a CUDA graph alone: its step runs in the next larger bucket that is ready, or if there
        is none or it has to be exact, is launched as it is; the graph is captured while later steps run.

        Args:
            step: of a bucket.
            waiting: how many rows the call has that waits for it.
            unchanged: the model cannot have changed since the last prefill or the last call without this.
            number: its number among those that are prepared, to be shown.
            anchors: if the program of several rows is compiled now, capture the largest bucket, too, in which any can
                run.
            exact: run in no other bucket; if others have to make room for its CUDA graph, capture it now.

        Returns:
            The step to run.
        """
        graph_manager = self._graph_manager
        if step == self._spare:
            self._spare = None
        if unchanged and graph_manager.was_valid(step):
            return step
        if unchanged and waiting and step in self._launchable - self.ready:
            larger = None if exact else self._larger(step)
            if exact or (larger is not None and graph_manager.was_valid(larger)):
                return self._run_missing(step, larger)
        if not (unchanged and step in self.ready):
            graph_manager.check_model()
        if step in self.ready and graph_manager.is_valid(step):
            return step
        if waiting and self._cuda_graphs.ours and (serving := self._serving(step, exact)) is not None:
            return serving
        self.claim(None)
        first = self._is_first(step)
        self._prepare(step, waiting, number, first)
        if first and anchors:
            self.capture_anchors(only_with_room=exact)
        return step if step in self.ready else self._largest  # which may have taken the only room

    def capture_anchors(self, only_with_room: bool = True) -> None:
        """Capture the largest bucket, so that no step waits for a smaller one; ``only_with_room`` evicts no other."""
        ready = self.ready_steps
        missing = self._cuda_graphs.ours and ready and ready[-1].rows > 1 and self._largest not in ready
        if missing and not (only_with_room and self._state.cuda_graphs.full):
            self._prepare(self._largest, 0, "", False)
            self._spare = self._largest

    def _serving(self, step: StepKey, exact: bool) -> StepKey | None:
        """Return the step that runs in place of one that is not captured; None if that has to be compiled first."""
        graph_manager = self._graph_manager
        self._launchable.discard(step)
        if step in self.ready or not graph_manager.can_launch(self._inputs(step)):
            return None
        if exact and self._cuda_graphs.needs_room_now(step):
            return None
        self._launchable.add(step)
        larger = None if exact else self._larger(step)
        return self._run_missing(step, larger) if larger is None or graph_manager.is_valid(larger) else None

    def _larger(self, step: StepKey) -> StepKey | None:
        """Return the next larger step that is ready, if there is one."""
        return next((other for other in self.ready_steps if other > step), None)

    def _run_missing(self, step: StepKey, larger: StepKey | None) -> StepKey:
        """Return what runs in place of a step that is missing: the larger one, or if there is none, itself."""
        if larger is None:
            self._state.cuda_graphs.missed(step)
            return step  # ``run`` has it captured
        self.missed(step)
        if self._cuda_graphs.can_begin:
            self._cuda_graphs.want(step, functools.partial(self._begin_capture, step))
        return larger

    def missed(self, step: StepKey) -> None:
        """Count a step that runs in a larger one than the one that was wanted."""
        self._state.cuda_graphs.missed(step, padded=True)

    def _begin_capture(self, step: StepKey) -> None:
        """Begin to capture a step that may never have run, over rows of padding."""
        if self._planned is not None:
            self._planned.plan_padding(step)
        self._capture(step, step.rows)

    def _capture(self, step: StepKey, like: StepOutputs | int, background: bool = True) -> None:
        self._graph_manager.capture(step, self._inputs(step), like, background=background)

    def _prepare(self, step: StepKey, waiting: int, number: str, first: bool) -> None:
        """Compile a step, the ``first`` with the rows that suit all, and capture it."""
        graph_manager, what = self._graph_manager, f"decode bucket {step.rows}"
        waiting = 0 if self._cuda_graphs.lost(step) else waiting
        program = program_for(self._inputs(step)).name
        shown = f"decode, {'1 row' if step.rows == 1 else f'{step.rows} rows'}{number}"
        with graph_manager.preparing(what, waiting, program, shown), self._cuda_graphs.accounted(what):
            if first and step < (suiting := self.step_for(min(_ROWS_TO_COMPILE, self._largest.rows))):
                self._launch_padding(suiting)
            for _ in range(_CALLS_TO_CAPTURE - 1 if graph_manager.programs.in_trees else 0):
                self._launch_padding(step)
            outputs = self._launch_padding(step)
            graph_manager.programs.warn_if_nothing_matched(self._state.facts.model)
            if self._cuda_graphs.ours:
                self._capture(step, outputs, background=False)
        self.ready.add(step)

    def _is_first(self, step: StepKey) -> bool:
        """Whether this one compiles the program of several rows, on CUDA, where its size does not stay built in."""
        programs = self._graph_manager.programs
        on_cuda = self._cuda_graphs.ours or (self._state.device.type == "cuda" and not programs.in_trees)
        return on_cuda and step.rows > 1 and not graph_count(programs.functions[DECODE_MANY])

    def _launch_padding(self, step: StepKey) -> StepOutputs:
        self.place([], step, "bucket_prepared")
        self._state.arena.flush()
        return self._launch(step)

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
        """Size of the page table of planned steps, in bytes."""
        return 0 if self._planned is None else self._planned.nbytes

    @property
    def follows_pages(self) -> bool:
        """Whether steps are planned, again whenever a row enters a page."""
        return self._planned is not None

    def place(self, rows: Sequence[Row], step: StepKey, cause: UploadCause) -> None:
        """Put rows, already grown by the token that they are about to feed in, in the decode buffers.

        Their slots have their page numbers; the rest of the bucket becomes padding.
        """
        self._state.decode_buffers.place(rows, step.rows)
        self._written(rows, step, cause)

    def stay(self, rows: Sequence[Row], step: StepKey, cause: UploadCause) -> None:
        """Keep rows at their batch indices although their pages have changed; otherwise as ``place``."""
        self._state.decode_buffers.place_padding(len(rows), step.rows)
        self._written(rows, step, cause)

    def _written(self, rows: Sequence[Row], step: StepKey, cause: UploadCause) -> None:
        if self._planned is not None:
            self._planned.lay_out(rows, step)
        self._graph_manager.events.uploads[cause] += 1
        logger.debug("decode bucket %d: %d rows written: %s", step.rows, len(rows), cause)

    def feed(self, rows: int, step: StepKey, tokens: Tensor) -> None:
        """Let the first rows in the decode buffers feed in ``tokens`` ``[rows]``, on the device."""
        self._state.arena.flush()
        slots = self._state.decode_buffers.bucket(step.rows).slots[:rows]
        self._state.slots.tables.next_token.index_copy_(0, slots, tokens.long())

    def run(self, step: StepKey, wanted: StepKey) -> StepOutputs:
        """Run one step of the rows in the buffers.

        Args:
            step: of B rows.
            wanted: the one that runs if all are ready.

        Returns:
            ``[B, V]`` logits, and ``[B]`` int64, the next tokens; both overwritten by the next step.
        """
        self._graph_manager.events.used[wanted] += 1
        self._state.arena.flush()
        if (cuda_graph := self._cuda_graphs.get(step)) is not None:
            outputs: StepOutputs = cuda_graph.replay()
            return outputs
        outputs = self._launch(step)
        if self._cuda_graphs.ours:
            self._cuda_graphs.want(step, functools.partial(self._capture, step, outputs))
        return outputs

    def launch(self, rows: int, step: StepKey, wanted: StepKey) -> DecodeLaunch:
        """Return how a step of ``rows`` rows in the buffers is launched again; arguments as in ``run``."""
        graph = self._cuda_graphs.get(step)
        return DecodeLaunch(
            graph,
            program=functools.partial(self._launch, step),
            feed=functools.partial(self.feed, rows, step),
            arena=self._state.arena,
            used=self._graph_manager.events.used,
            wanted=wanted,
            missed=None if wanted == step else functools.partial(self.missed, wanted),
            repeats=graph is not None or not self._cuda_graphs.ours,
            alone=not self._cuda_graphs.background_captures,
        )

    def _launch(self, step: StepKey) -> StepOutputs:
        graph_manager = self._graph_manager
        with graph_manager.paged():
            return graph_manager.programs.decode(graph_manager.arguments(self._inputs(step)))

    def _inputs(self, step: StepKey) -> DecodeInputs:
        inputs = self._state.decode_buffers.bucket(step.rows)
        return inputs if self._planned is None else inputs._replace(planned=self._planned.of(step))
