"""A step of one shape, bound once: its program over the buffers, or the CUDA graph that was captured of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from compiled_llm.compat.torch.profiler import is_profiling
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.step_table import StepEntry
from compiled_llm.compilation.programs import PreparedCall
from compiled_llm.execution.reporting.events import Events
from compiled_llm.execution.state.runner_tap import RunnerTap
from compiled_llm.execution.threads.interrupts import allowed


class BoundProgram:
    """A decode program over the buffers of a step, to be called again and again."""

    # The first call checks the guards of compiled code. As long as nothing changes, later ones run the same code, with
    # the same arguments. Those keep the model alive until ``release``.

    def __init__(
        self,
        prepare: Callable[[], PreparedCall],
        paged: Callable[[], AbstractContextManager[None]],
        guarded: bool,
        in_trees: bool,
    ) -> None:
        """``prepare`` returns a call, to be made within ``paged``, each one step of trees if ``in_trees``."""
        self._prepare, self._paged, self._guarded, self._in_trees = prepare, paged, guarded, in_trees
        self._call: Callable[[], StepOutputs] | None = None
        self._code: Callable[..., Any] | None = None  # that ran, if it is known
        self._ran = self._profiled = False

    def __call__(self) -> StepOutputs:
        if self._in_trees:
            torch.compiler.cudagraph_mark_step_begin()
        with self._paged():
            call = self._call
            if call is None or self._profiled is not is_profiling():  # a profile names ops
                call = self._bound()
            outputs = call()
        self._ran = True
        return outputs

    def release(self) -> None:
        """Let go of the arguments; a further call prepares them again."""
        self._call = None

    def _bound(self) -> Callable[[], StepOutputs]:
        prepared, self._profiled = self._prepare(), is_profiling()
        if self._ran and not self._guarded:
            prepared = prepared.unguarded(self._code)
        call, self._code = prepared.bound(), prepared.code
        if self._ran:  # a step that is not repeated keeps nothing
            self._call = call
        return call


class Launch:
    """A step that is ready to run, for rows of which the buffers have all that it reads.

    Attributes:
        key: the step that runs, of B rows, in place of ``wanted``.
        entry: of which it replays the CUDA graph, so that to launch it takes no time; None if its program runs.
        new_tokens: those of each row, of a decode step.
        captures_now: whether a graph of it is captured at once, since others have to make room for it.
        repeats: whether it can be launched again as it is; a missing graph would not be captured then.
        alone: whether nothing is to be done between two launches, as captures that go on in time slices are.
        outputs: of its last run, overwritten by the next; a CUDA graph always writes the same tensors.
    """

    outputs: StepOutputs

    def __init__(
        self,
        wanted: StepKey,
        key: StepKey,
        entry: StepEntry[Any] | None,
        events: Events,
        *,
        program: Callable[[], StepOutputs] | None = None,
        missed: Callable[[StepKey, bool], None] | None = None,
        capture: Callable[[StepOutputs], None] | None = None,
        taps: Sequence[RunnerTap] = (),
        alone: bool = True,
        captures_now: bool = False,
    ) -> None:
        """Run ``key`` in place of ``wanted``, by the CUDA graph of ``entry``, or without one by the ``program``."""
        # ``missed`` counts a step whose graph is missing; ``capture`` takes the outputs from which one is captured.
        self.wanted = wanted
        self.key = key
        self.entry = entry
        self.new_tokens = key.tokens // key.rows
        self.captures_now = captures_now
        self.repeats = capture is None
        self.alone = alone
        self._events = events
        self._program = program
        self._missed = missed
        self._capture = capture
        self._taps = taps

    @property
    def replays(self) -> bool:
        """Whether it replays a CUDA graph."""
        return self.entry is not None

    def over(self, program: Callable[[], StepOutputs]) -> Launch:
        """Return this launch, which now runs a program over tensors made for it alone, in place of a CUDA graph."""
        self.entry = None
        self._program = program
        return self

    def release(self) -> None:
        """Let go of the model: the step is not repeated any more."""
        if isinstance(self._program, BoundProgram):
            self._program.release()

    def __call__(self) -> StepOutputs:
        """Count it and run it."""
        self._events.used[self.wanted] += 1
        if self._missed is not None:
            self._missed(self.wanted, self.key != self.wanted)
        if self.key.shares:
            self._events.cascade_steps += 1
        if (entry := self.entry) is None:
            assert self._program is not None, "there is no graph"
            with allowed():  # it may take long
                self.outputs = self._program()
        else:
            entry.replays += 1
            entry.used = entry.clock()
            assert entry.cuda_graph is not None, "a step without its graph is not valid"
            entry.cuda_graph.launch()
            self.outputs = entry.cuda_graph.outputs
        for tap in self._taps:
            tap.inspect()
        if self._capture is not None:
            self._capture(self.outputs)
        return self.outputs
