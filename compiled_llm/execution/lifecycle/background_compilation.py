"""Compiles a model's programs in a thread, on a CPU, while the same programs answer uncompiled."""

# The thread runs its programs over a few pages and rows of padding of its own, so it writes nothing that an answer
# reads. Of the cores it leaves one to the answers: it is one thread, which starts fewer compilers than there are cores.
# An answer ends in the mode that it began in: what is compiled takes over when a row comes in, and no other one runs or
# has lost its pages in the midst of its answer.

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from compiled_llm.compat.forks import HomeProcess, lock
from compiled_llm.compat.torch.dynamo import switched_off
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.programs import Programs
from compiled_llm.config import WrapConfig
from compiled_llm.execution.model_runner import ModelRunner, Uncompiled
from compiled_llm.execution.reporting.events import Events
from compiled_llm.execution.steps.graph_manager import GraphManager
from compiled_llm.execution.threads.calling_thread import CallingThread
from compiled_llm.execution.threads.compiling_thread import CompilingThread, log_failure
from compiled_llm.model.facts import ModelFacts

logger = logging.getLogger("compiled_llm.graphs")

_PAGES = 4
"""Its own, for rows of padding."""
_DRAIN_AFTER = 10.0
"""Seconds that rows may go on coming in while others run uncompiled; later ones wait until these have ended."""


class _Compiled(NamedTuple):
    """Programs that are ready to take over, for a model that was placed as ``made_for`` says, since a time."""

    programs: Programs
    made_for: tuple[Hashable, ...]
    steps: Sequence[StepKey]
    since: float


class BackgroundCompilation:
    """A compiler of what ``begin`` asks for, which takes over between two answers; safe to use from any thread."""

    def __init__(self, facts: ModelFacts, config: WrapConfig) -> None:
        self._facts = facts
        self._config = config
        self._home = HomeProcess()
        self._lock = lock()
        self._wanted: list[StepKey] = []
        self._needs: dict[StepKey, Callable[[ModelRunner], object]] = {}
        self._rows = 0
        self._thread: CompilingThread | None = None
        self._compiled: _Compiled | None = None
        self._failed = self._stopped = False

    @property
    def admission_deadline(self) -> float:
        """Until when rows may come in while others run, on ``time.monotonic``'s clock; without a limit, ``inf``."""
        # Later ones wait until those have ended, so that what is compiled takes over on a busy server, too.
        compiled = self._compiled
        return math.inf if compiled is None else compiled.since + _DRAIN_AFTER

    @property
    def running(self) -> bool:
        thread = self._thread
        return thread is not None and thread.running

    def learn(self, facts: ModelFacts) -> None:
        """Compile for other facts of the model from now on."""
        with self._lock:
            self._facts, self._compiled = facts, None

    @property
    def uncompiled(self) -> Uncompiled | None:
        """Why new answers run uncompiled, before it has taken over; None if nothing was asked for, or all is there."""
        if self._failed:
            return "failed"
        return "compiling" if self._wanted and self._compiled is None else None

    def begin(
        self,
        steps: Sequence[StepKey],
        rows: int | None = None,
        needs: Callable[[ModelRunner], object] | None = None,
    ) -> None:
        """Begin to compile prefill and decode steps, with room for so many rows; those of earlier calls, too."""
        # None stands for the ``rows`` of the call before. ``needs`` gives a model runner what these steps need of a
        # part.
        with self._lock:
            rows = self._rows if rows is None else rows
            self._needs |= {} if needs is None else dict.fromkeys(steps, needs)
            wanted, self._failed = sorted({*self._wanted, *steps}), False
            if (wanted, rows) != (self._wanted, self._rows):
                self._wanted, self._rows, self._compiled = wanted, rows, None
            if self._compiled is None:
                self._start()

    def wait(self) -> None:
        """Wait until it compiles no more."""
        while (thread := self._thread) is not None and thread.running:
            thread.wait()

    def let_take_over(self, graph_manager: GraphManager) -> None:
        """Let what is compiled take over from programs that run uncompiled; in the executor, while no row runs."""
        # If the model is no longer what it was compiled for, it is compiled again.
        with self._lock:
            if (compiled := self._compiled) is None:
                self._start()
                return
            self._compiled = None
            if compiled.made_for == self._facts.version.placement and compiled.programs.code_valid():
                graph_manager.take_over(compiled.programs, compiled.steps)
            else:
                self._start()

    def stop(self) -> None:
        """Let the thread end soon, and compile nothing more."""
        self._stopped = True
        if (thread := self._thread) is not None:
            thread.interrupt()

    def _start(self) -> None:
        over = self.running or self._failed or self._stopped or self._home.left
        if self._wanted and not over and switched_off() is None:
            self._thread = CompilingThread(self._compile_all, self._note_failure)

    # ---- in the thread

    def _compile_all(self) -> None:
        while not self._compile():
            pass

    def _note_failure(self, error: BaseException) -> None:
        self._failed = True
        log_failure(error, "answers stay uncompiled")

    def _compile(self) -> bool:
        """Compile all that is asked for by the end of it; False if it needs room for other rows by then."""
        began, facts, rows = time.monotonic(), self._facts, self._rows
        made_for = facts.version.placement
        thread, memory = CallingThread(self._facts.model.device, awaited=False), _PAGES * self._config.page_size
        config = replace(self._config, eager_first=False, progress=False, kv_memory=f"{memory} tokens")
        programs = Programs(config, facts, facts.model.device, compilers=max(1, torch.get_num_threads() - 1))
        model_runner = thread.call(ModelRunner, facts, config, thread, Events(), programs, max_rows=rows)
        thread.call(model_runner.prefill.launches.make_ready)
        steps: list[StepKey] = []
        while missing := [step for step in self._wanted if step not in steps]:
            if (give := self._needs.get(missing[0])) is not None:
                thread.call(give, model_runner)
            thread.call(model_runner.steps.ready, missing[0])
            steps.append(missing[0])
        programs = model_runner.graph_manager.programs  # others than before, if the model's code has changed
        programs.drop_tensors()
        seconds = time.monotonic() - began
        with self._lock:
            if rows != self._rows or facts is not self._facts or len(steps) < len(self._wanted):
                return False
            self._compiled, self._thread = _Compiled(programs, made_for, steps, time.monotonic()), None
        logger.info("compiled_llm: compiled in the background, in %.0f s; new answers use it from now on", seconds)
        return True
