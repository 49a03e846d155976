"""Programs that a thread compiles while steps run others, so that no call waits for them."""

# It traces them over the tensors that steps use, of which tracing reads the shapes alone, and runs nothing: it takes no
# device memory, and no capture is disturbed. What a program does at its first run is left to that: kernels are loaded,
# and their tilings timed, over rows of padding.

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from compiled_llm.compilation.programs import Arguments, Programs
from compiled_llm.execution.threads.calling_thread import CallingThread
from compiled_llm.execution.threads.compiling_thread import CompilingThread, log_failure

logger = logging.getLogger("compiled_llm.graphs")

_TRIES = 3
"""How often a program is compiled that does not fit once it is there, as the model has changed meanwhile."""


class CompiledBeside:
    """The programs of a model that are compiled in a thread, one at a time; all but that is the executor's."""

    def __init__(self, device: torch.device, paged: Callable[[], AbstractContextManager[None]]) -> None:
        """``paged`` lets a thread use paged attention for the block."""
        self._device, self._paged = device, paged
        self._thread: CompilingThread | None = None
        self._compiled: dict[str, Programs] = {}  # by the name of the one that is compiled there
        self._tries: Counter[str] = Counter()

    def may_help(self, name: str) -> bool:
        """Return whether nothing is being compiled, and the program of this name may be, or is."""
        return not self.running and (self._tries[name] < _TRIES or name in self._compiled)

    def begin(self, name: str, programs: Programs, arguments: Arguments) -> None:
        """Begin to compile the program of a name, as ``programs`` have it, unless it has been tried too often."""
        if self._tries[name] < _TRIES:
            self._tries[name] += 1
            failed = partial(self._note_failure, name)
            self._thread = CompilingThread(partial(self._compile, name, programs, arguments), failed)

    def take(self, name: str) -> Programs | None:
        """Return the programs among which that of a name is compiled; None if it is not, or was taken."""
        return self._compiled.pop(name, None)

    def fits(self, name: str) -> None:
        """Note that what was taken fits the model, so that it is compiled again if it changes later."""
        self._tries[name] = 0

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.running

    def wait(self) -> None:
        """Wait until it compiles nothing."""
        if self._thread is not None:
            self._thread.wait()

    def drop(self) -> None:
        """Wait until it compiles nothing, and drop what nobody has taken: the model's tensors are to go."""
        self.wait()
        self._thread = None
        self._compiled.clear()

    # ---- in the thread

    def _compile(self, name: str, programs: Programs, arguments: Arguments) -> None:
        began, own = time.monotonic(), programs.beside()
        if own.interpreted:  # torch compiles nothing by now
            return
        CallingThread(self._device, awaited=False).call(self._compile_paged, own, arguments)
        self._compiled[name] = own
        logger.info("compiled_llm: %s was compiled in the background, in %.0f s", name, time.monotonic() - began)

    def _compile_paged(self, programs: Programs, arguments: Arguments) -> None:
        with self._paged():
            programs.compile_only(arguments)

    def _note_failure(self, name: str, error: BaseException) -> None:
        self._tries[name] = _TRIES
        log_failure(error, "steps go on without it")
