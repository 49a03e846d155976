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
        entry: of which it replays the CUDA graph; None if its program runs.
        accepts: whether rows feed in guesses, of which the device decides how many count.
        captures_now: whether a graph of it is captured at once, since others have to make room for it.
        replays: whether it replays a CUDA graph, so that to launch it takes no time.
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
        program: Callable[[], StepOutputs] | None = None,
        missed: Callable[[StepKey, bool], None] | None = None,
        taps: Sequence[RunnerTap] = (),
        capture: Callable[[StepOutputs], None] | None = None,
        alone: bool = True,
        shares: bool = False,
        captures_now: bool = False,
    ) -> None:
        """Run ``key`` in place of ``wanted``, by the CUDA graph of ``entry``, or without one by the ``program``."""
        # ``missed`` counts a step whose graph is missing; ``capture`` takes the outputs from which one is captured;
        # ``shares`` says whether pages that rows share are read once.
        self.wanted, self.key, self.replays, self.alone = wanted, key, entry is not None, alone
        self.new_tokens = key.tokens // key.rows
        self.accepts = bool(key.drafter)
        self.repeats = capture is None and (self.new_tokens == 1 or self.accepts)
        self.entry, self.captures_now, self._program = entry, captures_now, program
        self._used, self._cascaded = events.used, events.cascaded if shares else None
        self._missed, self._taps, self._capture = missed, taps, capture

    def over(self, program: Callable[[], StepOutputs]) -> Launch:
        """Return this launch, which now runs a program over tensors made for it alone, in place of a CUDA graph."""
        self.entry, self._program, self.replays = None, program, False
        return self

    def release(self) -> None:
        """Let go of the model: the step is not repeated any more."""
        if isinstance(self._program, BoundProgram):
            self._program.release()

    def __call__(self) -> StepOutputs:
        """Count it and run it."""
        self._used[self.wanted] += 1
        if self._missed is not None:
            self._missed(self.wanted, self.key != self.wanted)
        if self._cascaded is not None:
            self._cascaded()
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
