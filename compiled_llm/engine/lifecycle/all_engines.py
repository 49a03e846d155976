"""All engines of a model, which share its weights and its pages, paused together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TypeVar

from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.execution.threads.interrupts import deferred

Changed = TypeVar("Changed")
_PATIENCE = 0.5
"""Seconds to wait for an engine while others are paused: several steps, since it lets go after one."""


def engine_threads_of(runtime: Runtime) -> list[EngineThread]:
    """Return all engines of a model, always in one order: threads then do not wait for each other."""
    return sorted(
        (found for found in list(runtime.engines) if isinstance(found, EngineThread) and not found.closed), key=id
    )


@contextmanager
def all_paused(runtime: Runtime) -> Iterator[list[EngineThread]]:
    """Let no engine run."""
    # A thread that has paused one engine may use another, so that one must not stay paused here while this thread waits
    # for the first: an engine that cannot be paused soon is waited for alone.
    engine_threads, last = engine_threads_of(runtime), None
    while True:
        with ExitStack() as stack:
            last = _first_taken(sorted(engine_threads, key=lambda engine_thread: engine_thread is not last), stack)
            if last is None:
                yield engine_threads
                return


def _first_taken(engine_threads: list[EngineThread], stack: ExitStack) -> EngineThread | None:
    """Pause engines until the end of the stack; return the first that another thread keeps, None if there is none."""
    # The first one is waited for without a limit.
    for number, engine_thread in enumerate(engine_threads):
        if not stack.enter_context(engine_thread.paused(_PATIENCE if number else math.inf)):
            return engine_thread
    return None


def check_outside(runtime: Runtime, doing: str) -> None:
    """Raise RuntimeError, begun by ``doing``, if this thread is inside a call, or runs or has paused an engine."""
    if runtime.calls.here or runtime.loop_lock.here:
        raise RuntimeError(f"{doing}: a call of the model is in progress in this thread; call it from outside of that")
    for engine_thread in engine_threads_of(runtime):
        engine_thread.step_lock.check_elsewhere()


def run_alone(
    runtime: Runtime,
    doing: str,
    act: Callable[[list[EngineThread]], Changed],
    inside: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Changed:
    """Call ``act`` with all engines once the calls of the model in progress have ended, and while nothing runs.

    Calls that come later wait for its end. Each try is ``inside`` a context. ``doing`` and errors are as of
    ``check_outside``.
    """
    check_outside(runtime, doing)
    engine_threads = engine_threads_of(runtime)
    with runtime.calls.waiting(), ExitStack() as stack:
        for engine_thread in engine_threads:
            stack.enter_context(engine_thread.joined.left())
        while True:
            runtime.calls.wait()  # engines run on meanwhile: a streamer may wait for one
            with inside(), all_paused(runtime) as paused, runtime.calls.barred() as barred:
                if barred:
                    with runtime.loop_lock.taken(fits=lambda: False):  # once no loop is in progress that is no call's
                        return act(paused)


@deferred()
def with_no_pages(runtime: Runtime, doing: str, change: Callable[[list[EngineThread]], Changed]) -> Changed:
    """As ``run_alone``; requests compute again what they have in pages."""

    def parked(engine_threads: list[EngineThread]) -> Changed:
        for engine_thread in engine_threads:
            engine_thread.placed.park()
        return change(engine_threads)

    return run_alone(runtime, doing, parked)
