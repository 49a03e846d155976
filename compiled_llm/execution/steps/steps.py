"""Which step is ready to run, and what is compiled and captured so that a decode step is."""

# Shapes: B rows of a bucket, q new tokens of each, T = B * q.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compiled_llm.compat.torch.dynamo import graph_count
from compiled_llm.compilation.graphs.captured_shapes import bucket_for
from compiled_llm.compilation.graphs.cuda_graphs import Begin
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.step_table import StepEntry
from compiled_llm.compilation.program import with_outputs
from compiled_llm.compilation.program_list import program_for
from compiled_llm.execution.reporting.progress import TaskNumber
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.steps.decode_buffers import DecodeBuffers
from compiled_llm.execution.steps.dispatcher import Dispatcher
from compiled_llm.execution.steps.graph_manager import GraphManager
from compiled_llm.execution.steps.launch import BoundProgram, Launch
from compiled_llm.execution.steps.sampling_graphs import SamplingGraphs
from compiled_llm.kinds.support import refusal
from compiled_llm.kvcache.memory import wait_for

# Cudagraph trees run a new shape once as it is, capture it on the second call and replay it from the third.
_CALLS_TO_CAPTURE = 3

# Inductor chooses the blocks of its kernels for the rows that it sees first, and keeps them for all numbers of rows. On
# an H200, those chosen for 64 rows are up to 2 % faster than those for 2 from 64 rows on, and not slower with fewer.
_ROWS_TO_COMPILE = 64


class Steps:
    """The steps of one model."""

    def __init__(
        self,
        state: RunnerState,
        graph_manager: GraphManager,
        dispatcher: Dispatcher,
        buffers: DecodeBuffers,
    ) -> None:
        """Run decode steps over these buffers."""
        self._state, self._graph_manager, self.buffers = state, graph_manager, buffers
        self._dispatcher, self.sampling_graphs = dispatcher, SamplingGraphs(state, graph_manager.cuda_graphs.ours)
        self._table, self._cuda_graphs = state.step_table, graph_manager.cuda_graphs
        most = state.config.max_batch_size
        self._decodes = [StepKey.decode(bucket_for(rows, most)) for rows in range(most + 1)]
        self._largest = self._decodes[most]
        self._table.anchors["decode"] = [self._largest]

    def ready(
        self,
        wanted: StepKey,
        waiting: int = 0,
        number: TaskNumber | None = None,
        anchors: bool = True,
        exact: bool = False,
    ) -> Launch:
        """Return the launch of a step; compile a decode step and capture its graph first, if that is needed."""
        # A call does not wait for a CUDA graph alone: its step runs in the next larger one that is ready, or if there
        # is none or it has to be exact, is launched as it is; the graph is captured while later steps run.
        # With ``anchors``, if the program of several rows is compiled now, the largest step is captured, too, in which
        # any can run. An ``exact`` one runs in no other step; if others have to make room for its CUDA graph, it is
        # captured now.
        if wanted.phase != "decode":  # prefills have checked the model, and sampling does not depend on the model
            return self._of_new_inputs(wanted, exact)
        checked = self.check_model_if_due()
        if (entry := self._table.entries.get(wanted)) is not None:
            entry.spare = False
            if self.may_replay(entry):
                return self._launch_of(wanted, wanted)
        if (key := self._runnable(wanted, waiting > 0, exact, checked)) is None:
            key = self._make_ready(wanted, waiting, number, anchors, exact)
        elif key != wanted:
            self.want_padded(wanted, key, lambda: self._begin_capture(wanted))
        return self._launch_of(wanted, key)

    def _runnable(self, wanted: StepKey, waits: bool, exact: bool, checked: bool) -> StepKey | None:
        """Return what runs now in place of a decode step; None if that has to be compiled or captured first."""
        # If no call ``waits``, that is the step itself, with all that it can have. ``checked``: the model, just now.
        manager, table = self._graph_manager, self._table
        if manager.eager:
            table.compiled(wanted)
            return wanted
        while True:
            step, how = self._dispatcher.dispatch(wanted, exact)
            if how == "run" and (waits or step == wanted):
                if self.may_replay(table.entries[step]):
                    return step
            elif how == "launch" and waits:
                return wanted
            elif how != "compile":
                return None
            else:
                if not checked and table.state(wanted) in ("missing", "stale"):
                    manager.check_model()
                    checked = True
                if not (waits and self._dispatcher.captures and self._can_launch(wanted)):
                    return None

    def _make_ready(
        self, wanted: StepKey, waiting: int, number: TaskNumber | None, anchors: bool, exact: bool
    ) -> StepKey:
        """Compile and capture a decode step, and if it compiles their program, the largest; return what runs."""
        self.buffers.claim(None)
        first = self._is_first(wanted)
        self._prepare(wanted, waiting, number, first)
        if first and anchors and wanted.is_plain and not wanted.shares:
            self.capture_anchors(only_with_room=exact)
            if self._table.state(wanted) == "evicted":  # the largest has taken the only room
                return self._largest
        return wanted

    def _of_new_inputs(self, wanted: StepKey, exact: bool) -> Launch:
        """Return the launch of a step of new inputs each time, ``over`` whose program it runs if it has no graph."""
        key, how = self._dispatcher.dispatch(wanted, exact)
        entry = self._table.get(key)
        missed = self._table.missed if wanted.is_prefill and (key != wanted or entry is None) else None
        return Launch(wanted, key, entry, self._graph_manager.events, missed=missed, captures_now=how == "capture")

    def check_model_if_due(self) -> bool:
        """Check the model if it may have changed since the last check; return whether it was checked."""
        if due := self._graph_manager.checked_for is not self._state.facts.version.expected:
            self._graph_manager.check_model()
        return due

    def may_replay(self, entry: StepEntry[Any]) -> bool:
        """Return whether a step may run at once as it is; CUDA graphs of what has changed are all forgotten."""
        if entry.state != self._table.runnable_state:
            return False
        if entry.checked_at == (check := self._table.model_checks):  # what was found then still holds
            return True
        if entry.guards is not None:
            with self._state.facts.attention.paged():
                valid = entry.guards.valid()
            if not valid:
                wait_for(self._state.device)  # a replay that found this out late may be running
                self._graph_manager.forget_graphs()
                self._graph_manager.programs.drop_tensors()
                return False
        entry.checked_at = check
        return True

    def want_padded(self, wanted: StepKey, key: StepKey, begin: Begin) -> None:
        """If a step runs in a larger one, let ``begin`` begin its capture while steps go on."""
        if key != wanted:
            self._cuda_graphs.want(wanted, begin, padded=True)

    def is_ready(self, step: StepKey) -> bool:
        """Return whether a step is compiled, and on CUDA captured."""
        return self._table.state(step) == self._table.runnable_state

    @property
    def wanted_buckets(self) -> list[int]:
        """The ready buckets without the one in which only smaller ones have run."""
        return [step.rows for step in self._table.runnable("decode") if not self._table.entries[step].spare]

    def decode_of(self, rows: int, previous: StepKey | None = None, exact: bool = False) -> StepKey:
        """Return the smallest decode step that holds so many rows; if there were more, the smallest that is ready."""
        # So no step waits for a smaller one to be prepared because rows have ended. Exact steps go on in one of at most
        # half the rows, ready or not: no step waits for its CUDA graph. One row stays in the program of several.
        # ``previous`` is the step that was wanted before for the same rows and others.
        smallest = self._decodes[rows]
        if previous is None or smallest.rows >= previous.rows:
            return smallest
        if exact and self._dispatcher.captures:
            return self._decodes[max(rows, 2) if 2 * smallest.rows <= previous.rows else previous.rows]
        between = (step for step in self._table.runnable("decode") if smallest.rows <= step.rows <= previous.rows)
        return next(between, smallest)

    def step_of_several(self, rows: int, new_tokens: int) -> StepKey:
        """Return the smallest step of several new tokens a row; ValueError if the backend has none."""
        step, ops = StepKey.decode(self._decodes[rows].rows, new_tokens), self.buffers.ops
        if ops is None or not ops.several:
            raise ValueError(
                f"backend={self._state.config.backend!r} decodes one new token of each row at a time, not "
                f"{new_tokens}; leave drafts out"
            )
        given = f"{new_tokens} new tokens for each row"
        if (refused := refusal(self._state.facts.kinds, "drafts", given)) is not None:
            raise ValueError(refused)
        scores = self._state.scores
        if scores is not None and (needed := scores.of_decode(step.rows, new_tokens)) > scores.limit:
            raise ValueError(
                f"{new_tokens} new tokens for each of {step.rows} rows need {needed} bytes for an indexer's scores, "
                f"more than the {scores.limit} that there are; feed in fewer at a time"
            )
        return step

    def _can_launch(self, step: StepKey) -> bool:
        """Return, and note, whether a step can be launched without compiling; ``check_model`` has been called."""
        manager, inputs = self._graph_manager, self.buffers.of(step)
        with manager.paged():
            compiled = manager.programs.full(inputs) or manager.programs.compiled_for(manager.arguments(inputs))
        if compiled:
            self._table.compiled(step)
        return compiled

    def _launch_of(self, wanted: StepKey, key: StepKey) -> Launch:
        """Return the launch of ``key``, which is valid, in place of ``wanted``."""
        graphs, entry = self._cuda_graphs, self._table.entries.get(key)
        if entry is not None and entry.cuda_graph is None:
            entry = None
        captures = graphs.ours and entry is None
        return Launch(
            wanted,
            key,
            entry,
            self._graph_manager.events,
            program=self._program(key) if entry is None else None,
            missed=self._table.missed if captures or key != wanted else None,
            capture=(lambda outputs: graphs.want(key, lambda: self._capture(key, outputs))) if captures else None,
            taps=self._state.taps,
            alone=not (self._table.pending and graphs.background_captures),
        )

    def _program(self, step: StepKey) -> BoundProgram:
        manager = self._graph_manager
        in_trees = manager.programs.in_trees
        return BoundProgram(
            lambda: manager.programs.prepared(manager.arguments(self.buffers.of(step))),
            self._state.facts.attention.paged,
            guarded=self._cuda_graphs.ours or in_trees,
            in_trees=in_trees,
        )

    def compile(self, step: StepKey) -> None:
        """Compile a decode step, if its program is not yet compiled; its CUDA graph is captured once it is wanted."""
        manager = self._graph_manager
        manager.check_model()
        if not (manager.eager or self._can_launch(step)):
            self.buffers.claim(None)
            self._prepare(step, 0, None, self._is_first(step), captures=False)

    def compiled_beside(self, step: StepKey) -> bool:
        """Return whether a decode step runs without compiling; if not, a thread compiles its program."""
        manager, program = self._graph_manager, program_for(self.buffers.of(step)).name
        if manager.eager:
            return True
        if not manager.beside.may_help(program):
            return False
        manager.check_model()
        if self._can_launch(step):
            return True
        if not manager.take_compiled(self.buffers.of(step)):
            return False
        self.buffers.claim(None)
        self._prepare(step, 0, None, first=False, captures=False)
        return True

    def make_ready_with_room(self, steps: Sequence[StepKey]) -> None:
        """Compile, and on CUDA capture, decode steps, the largest first, as far as no CUDA graph makes room for it."""
        for step in reversed(steps):
            if not (self.is_ready(step) or self._table.full):
                self.ready(step)

    def capture_anchors(self, only_with_room: bool = True) -> None:
        """Capture the largest step, so that none waits for a smaller one; ``only_with_room`` evicts no other."""
        ready = self._table.runnable("decode")
        missing = self._dispatcher.captures and ready and ready[-1].rows > 1 and self._largest not in ready
        if missing and not (only_with_room and self._table.full):
            self._prepare(self._largest, 0, None, False)
            self._table.entry(self._largest).spare = True

    def _prepare(
        self, step: StepKey, waiting: int, number: TaskNumber | None, first: bool, captures: bool = True
    ) -> None:
        """Compile a step, the ``first`` with the rows that suit all, and capture it."""
        graph_manager, new = self._graph_manager, step.new_tokens_per_row
        several = f", {new} tokens each" if new > 1 else ", shared pages read once" if step.shares else ""
        several = with_outputs(several, (f"drafts of {step.drafter}",) if step.drafter else step.wants)
        what = f"decode bucket {step.rows}{several}"
        waiting = 0 if self._table.entry(step).losses else waiting
        program = program_for(self.buffers.of(step)).name
        shown = f"decode, {'1 row' if step.rows == 1 else f'{step.rows} rows'}{several}"
        with graph_manager.preparing(what, waiting, program, shown, number), self._cuda_graphs.accounted(what):
            suiting = self._decodes[min(_ROWS_TO_COMPILE, self._largest.rows)]
            if first and step.rows < suiting.rows and not self._can_launch(step):  # as it was kept
                self._launch_padding(step._replace(tokens=suiting.rows, rows=suiting.rows))
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
        compiled = programs.functions.get(program_for(self.buffers.of(step)).name)
        return compiled is None or not graph_count(compiled)

    def _launch_padding(self, step: StepKey) -> StepOutputs:
        self.buffers.place([], step, "bucket_prepared")
        self._state.arena.flush()
        return self._program(step)()

    def _begin_capture(self, step: StepKey) -> None:
        """Begin to capture a step that has only run in a larger one, once it has run over rows of padding."""
        # What kernels do in their first launch cannot be captured.
        manager = self._graph_manager
        arguments = manager.arguments(self.buffers.of_padding(step))
        with manager.paged():
            outputs: StepOutputs = manager.programs.prepared(arguments).compiling_nothing()()
        self._capture(step, outputs)

    def _capture(self, step: StepKey, like: StepOutputs, background: bool = True) -> None:
        self._graph_manager.capture(step, self.buffers.of(step), like, background=background)
