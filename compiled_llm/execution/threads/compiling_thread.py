"""A thread that compiles while answers go on. The end of the process interrupts it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import threading
import weakref
from collections.abc import Callable

from compiled_llm.compat.contexts import callers_context
from compiled_llm.compat.forks import HomeProcess
from compiled_llm.compat.torch.dynamo import reason_of
from compiled_llm.compat.torch.process_settings import settings_left_alone, was_disturbed

logger = logging.getLogger("compiled_llm.graphs")

_TIME_TO_STOP = 2.0
"""Seconds that a thread has to stop before the process ends without it."""


_ATTEMPTS = 3
"""How often a thread compiles, as long as others change settings of the process meanwhile."""


class CompilingThread:
    """A thread that compiles once, and may be interrupted."""

    def __init__(self, compile: Callable[[], object], failed: Callable[[BaseException], object]) -> None:
        """Begin to ``compile``; ``failed`` is called with its error, of any kind, unless it was interrupted."""
        self._home, self._interrupted = HomeProcess(), False
        run, context = functools.partial(self._run, compile, failed), callers_context()
        self._thread = threading.Thread(target=context.run, args=(run,), name="compiled_llm compilation", daemon=True)
        if not _ending.is_set():
            _all.add(self)
            self._thread.start()

    def _run(self, compile: Callable[[], object], failed: Callable[[BaseException], object]) -> None:
        try:
            with settings_left_alone():
                self._compile(compile)
        except BaseException as error:  # any: the model may be anything. Answers go on without what it compiles
            if not self._interrupted:
                failed(error)

    @staticmethod
    def _compile(compile: Callable[[], object]) -> None:
        for left in reversed(range(_ATTEMPTS)):
            try:
                compile()
                return
            except AssertionError as error:
                if not (left and was_disturbed(error)):
                    raise

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it has ended."""
        while self.running and not self._home.left:
            self._thread.join(0.2)

    def interrupt(self) -> None:
        """Let it end soon, whatever it compiles."""
        self._interrupted = True
        if self.running and not self._home.left:
            interrupt = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident or 0), interrupt)
            self._thread.join(_TIME_TO_STOP)


def log_failure(error: BaseException, so: str) -> None:
    """Log that compiling in the background has failed, and what follows; all of the error only for debugging."""
    reason = reason_of(error, BaseException) or error
    logger.error(
        "compiled_llm: compiling in the background has failed, and %s: %s: %s",
        *(so, type(reason).__name__, str(reason).partition("\n")[0]),  # a compiler may have said a lot
    )
    logger.debug("compiled_llm: why compiling in the background has failed", exc_info=error)


_all: weakref.WeakSet[CompilingThread] = weakref.WeakSet()
_ending = threading.Event()


@atexit.register
def _interrupt_all() -> None:
    """Interrupt threads that compile: one inside torch while the interpreter shuts down aborts the process."""
    _ending.set()
    for thread in list(_all):
        thread.interrupt()
