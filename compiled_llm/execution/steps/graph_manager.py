"""A model's compiled programs and CUDA graphs, and whether they are still valid."""

# Nothing is run from here: prefill and decode ask, and run missing steps on rows of padding, never on a caller's
# tokens.

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from compiled_llm.compat.torch.stages import compiling_stage
from compiled_llm.compilation.artifacts.artifacts import Artifacts
from compiled_llm.compilation.graphs.cuda_graphs import CudaGraphs, Filled, StepInputs, StepToCapture
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.validity import Checks
from compiled_llm.compilation.program import PREFILL, PREFILL_EMBEDDED, ProgramInputs
from compiled_llm.compilation.program_list import UNPAGED, program_for
from compiled_llm.compilation.programs import Arguments, PreparedCall, Programs
from compiled_llm.execution.reporting.events import Events
from compiled_llm.execution.reporting.progress import ProgressDisplay, TaskNumber
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.steps.compiled_beside import CompiledBeside
from compiled_llm.execution.threads.executor import Executor
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.model.traced.stand_ins import Change
from compiled_llm.model.weights.fused_weights import FusedWeights

_NOT_PREPARED = (PREFILL_EMBEDDED, UNPAGED)
"""Programs that ``warmup`` does not prepare: few processes call them."""


def _nothing() -> None:
    return None


class GraphManager:
    """The programs and CUDA graphs of one model."""

    def __init__(
        self,
        state: RunnerState,
        weights: FusedWeights,
        thread: Executor,
        events: Events,
        programs: Programs | None = None,
        artifacts: Artifacts | None = None,
    ) -> None:
        self._state = state
        self._thread = thread
        self.events = events
        self.weights = weights  # the model's; those that read one input lie side by side in memory
        self._artifacts = artifacts
        self.programs = programs or self._new_programs()
        self.cuda_graphs = CudaGraphs(state.facts.model, state.config, state.device, state.step_table)
        self.beside = CompiledBeside(state.device, self.paged)
        self.table = state.step_table  # the steps of the model, each with its state
        self.prefills: set[str] = set()  # the programs of prefill that are compiled
        # Without a compiler there is nothing to wait for on a CPU.
        waits = state.device.type == "cuda" or state.config.mode != "eager"
        self._progress = ProgressDisplay(state.config.progress and waits)
        self.has_pages = True  # whether pages have memory: not while the model sleeps, nor after ``release``
        self._captures = False  # whether a step was captured since graphs were last forgotten
        self._version = state.facts.version
        # the changes that the last check has been for, as ``ModelVersion.expected`` names them
        self.checked_for: object = None
        self._tensors = self._version.tensors if self._needs_tensors else 0

    @property
    def eager(self) -> bool:
        """Whether programs run uncompiled until others ``take_over``: nothing has to be prepared for them."""
        return self.programs.eager

    def take_over(self, programs: Programs, steps: Sequence[StepKey]) -> None:
        """Run these programs from now on, of which prefill and decode ``steps`` are compiled; no row runs."""
        self.forget_graphs()
        self.programs = programs
        self.prefills = {PREFILL}
        for step in steps:
            self.table.compiled(step)

    @property
    def ready_buckets(self) -> list[int]:
        """The batch sizes of decode steps that are compiled, and on CUDA captured."""
        return [step.rows for step in self.table.runnable("decode")]

    @property
    def captured(self) -> int:
        """How many CUDA graphs steps are replayed from; cudagraph trees have one a bucket."""
        if self.cuda_graphs.ours:
            return len(self.cuda_graphs)
        return len(self.ready_buckets) if self.cuda_graphs.replay else 0

    def paged(self) -> AbstractContextManager[None]:
        """Let this thread use paged attention for the block."""
        return self._state.facts.attention.paged()

    def _moving_weights(self) -> AbstractContextManager[None]:
        return self._state.facts.attention.moving_weights(self._thread.caller)

    # ---- is it still valid?

    def check_model(self) -> None:
        """Check the model: drop CUDA graphs of weights that have moved, compile again what is no longer the same."""
        # RuntimeError as ``check_pages``.
        self.check_pages()
        self.table.model_checks += 1
        expected = self._version.expected
        self._state.validity.invalidate()  # a step that is repeated checks no guards
        self._version.begin_check()
        self._state.fit_vocabulary()
        if not self.programs.code_valid():
            self.events.started_again()
            self._start_again()
        if self._needs_tensors and self._tensors != self._version.tensors:
            if self.cuda_graphs.ours:
                self.forget_graphs()
            self._lay_weights_out()
            self._tensors = self._version.tensors
        if (changed := self._refresh_stand_ins()) == "code":
            self.events.started_again()
            self._start_again()
        in_place = self.programs.refresh_adapters(self._state.facts.in_programs, self.cuda_graphs.replay)
        if self.cuda_graphs.ours and not (in_place and changed is None):
            self.forget_graphs()
        self.checked_for = expected

    def _refresh_stand_ins(self) -> Change:
        """Let stand-ins follow the model, and lay what they multiply by side by side again if it no longer is."""
        facts = self._state.facts
        changed = facts.refresh_stand_ins()
        if changed is None or facts.stand_ins is None or facts.stand_ins.laid_out:
            return changed
        self._version.let_go()
        with self._moving_weights():
            stay = facts.lay_stand_ins_out()
        self._tensors = self._version.tensors
        return changed if stay else "code"

    def check_pages(self) -> None:
        """Raise RuntimeError if the model was put to sleep, and lies over other pages by now."""
        if not self.has_pages:
            raise RuntimeError("the pages of this call, cache or runner were given back by sleep(); begin again")

    @property
    def _needs_tensors(self) -> bool:
        """Whether we rely on where tensors are."""
        return self.cuda_graphs.ours or bool(self.weights.groups)

    def _lay_weights_out(self) -> None:
        """Fuse weights again; those that no longer can be are multiplied one by one from now on."""
        if self.weights.laid_out:
            return
        self._let_tensors_go()  # weights that someone else holds cannot be laid out again
        with self._moving_weights():
            restored = self.weights.restore()
        if not restored:
            self.events.started_again()
            self._start_again()

    def _let_tensors_go(self) -> None:
        self._version.let_go()
        self.beside.drop()
        self.programs.drop_tensors()
        self._state.facts.drop_stand_ins()

    def separate_weights(self) -> None:
        """Give each fused weight its own memory again."""
        if self.weights.groups or self._state.facts.groups_of_stand_ins:
            self.beside.drop()
            with self._moving_weights():
                self.weights.separate()
                self._state.facts.separate_stand_ins()
            self._start_again()

    def make_room(self) -> None:
        """Start again if torch no longer compiles one of the programs, so that it does."""
        if self.programs.full():
            self.events.started_again()
            self._start_again()

    def forget_graphs(self) -> None:
        """Drop all CUDA graphs: what they were captured of has changed."""
        self._captures = False
        self.cuda_graphs.forget()
        self._state.validity.invalidate()  # also if there were none

    def release(self) -> None:
        """Drop all CUDA graphs, and let go of all tensors; compiled programs stay, for another manager."""
        self.has_pages = False
        self.forget_graphs()
        self.prefills.clear()
        self._let_tensors_go()

    def _start_again(self) -> None:
        """Forget programs and CUDA graphs; rows and pages stay."""
        self.forget_graphs()  # first: while one is captured, its program has to stay
        self.beside = CompiledBeside(self._state.device, self.paged)  # the other's are of the model as it was
        self.programs = self._new_programs()
        self.prefills.clear()

    def _new_programs(self) -> Programs:
        state = self._state
        return Programs(state.config, state.facts, state.device, self.weights, self._artifacts)

    # ---- make it so

    def arguments(self, inputs: ProgramInputs) -> Arguments:
        """Return the arguments of programs for a step."""
        state = self._state
        return Arguments(state.facts.in_programs, inputs, state.slots.tables, state.memories, state.specs)

    def take_compiled(self, inputs: ProgramInputs) -> bool:
        """Take the program of a step that a thread has compiled meanwhile, if it still fits, else let it begin."""
        # ``check_model`` has been called.
        name, arguments = program_for(inputs).name, self.arguments(inputs)
        if (compiled := self.beside.take(name)) is not None:
            self.programs.take(name, compiled)
            with self.paged():
                if self.programs.prepared(arguments).compiled:
                    self.beside.fits(name)
                    return True
        self.beside.begin(name, self.programs, arguments)
        return False

    def capture(
        self,
        key: StepKey,
        inputs: StepInputs,
        like: StepOutputs,
        first: Callable[[], None] = _nothing,
        filled: Filled | None = None,
        background: bool = False,
    ) -> None:
        """Capture a step that has run before, unless it may have run uncompiled: nothing would guard that."""
        # ``like`` are its outputs; ``first`` launches the kernels before the program, in
        # any thread; ``filled`` is filled before each replay. In the ``background`` steps go on, and
        # ``CudaGraphs.adopt`` takes it over.
        if self.programs.full(inputs):
            return
        if not background:
            self.cuda_graphs.finish()
            self.cuda_graphs.adopt()
            if self.table.get(key) is not None:
                return
        if not self._captures:
            self._captures = True
            self._version.take_in_tensors()  # another number than ours: the next check drops what is captured now
        arguments = self.arguments(inputs)
        with self.paged():
            call = self.programs.prepared(arguments, compare=not background)
        guards = self.programs.guards(arguments, call)
        check = partial(_find_guards, guards, call, self.paged)
        step = StepToCapture(check, partial(_launch, call, self.paged, first), like, guards, filled)
        (self.cuda_graphs.begin if background else self.cuda_graphs.capture)(key, step)

    def run_capture_slices(self, ended: Callable[[], bool], settled: bool) -> None:
        """Run a time slice of pending captures, and further ones until their time has ``ended``."""
        if self.cuda_graphs.background_captures:
            with deferred():
                self.cuda_graphs.run_capture_slices(ended, settled)
            if not self.cuda_graphs.background_captures:
                self._state.validity.invalidate()  # steps need leave no time any more
        self.table.pending = self.cuda_graphs.background_captures

    @contextmanager
    def preparing(
        self, what: str, waiting: int, program: str, shown: str = "", number: TaskNumber | None = None
    ) -> Iterator[None]:
        """Show the preparation in the block, and note it if a call of ``waiting`` rows waits for it."""
        start, stage = time.perf_counter(), partial(compiling_stage, threading.get_ident())
        shown = f"{shown or what} ({number})" if number else shown or what
        with self.events.prepared(), self._progress.task(f"{self._doing(program)} {shown}", stage, number) as update:

            def say_compiling() -> None:
                update(f"compiling {shown}, once")

            with self.programs.compiling.telling(say_compiling):
                yield
        if waiting:
            self.events.waited(what, waiting, time.perf_counter() - start, preparable=what not in _NOT_PREPARED)

    def _doing(self, program: str) -> str:
        """Return the words with which a program's preparation begins."""
        config, kind = self._state.config, self._state.device.type
        if config.mode == "eager":
            return "preparing kernels for"
        if program in self.programs.ways():
            return "capturing" if config.captures_on(kind) or config.uses_trees_on(kind) else "preparing"
        if program in self.programs.kept:
            return "loading"
        has_kernels = kind == "cuda" and program in (PREFILL, PREFILL_EMBEDDED)
        return "preparing kernels for, and tracing" if has_kernels else "tracing"


_Paged = Callable[[], AbstractContextManager[None]]


def _find_guards(guards: Checks, call: PreparedCall, paged: _Paged) -> None:
    """Find the guards of a compiled call: to compile would fail in many ways while a graph is captured."""
    if not call.interpreted:
        with paged():
            guards.find()


def _launch(call: PreparedCall, paged: _Paged, first: Callable[[], None]) -> StepOutputs:
    with paged():
        first()
        outputs: StepOutputs = call.compiling_nothing()()
        return outputs
