"""Forked processes, which end soon or fail."""

from __future__ import annotations

import os
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from support.in_threads import start

PATIENCE = 20
"""Seconds after which a forked process counts as deadlocked."""

ELSEWHERE = "the model was wrapped in the process that this one was forked from, and works only there"
"""What a forked process is told that uses the model."""


def forked(function: Callable[[], Any]) -> None:
    """Run in a forked process, which must end soon, and check that it succeeded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of threads that a fork loses
        child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE)
        try:
            function()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFSIGNALED(status), "it hangs"
    assert os.WEXITSTATUS(status) == 0


@contextmanager
def another_thread(work: Callable[[Callable[[], None]], Any]) -> Iterator[None]:
    """Keep another thread inside of ``work`` for the block: where it first calls the function that it is given."""
    reached, go_on = threading.Event(), threading.Event()

    def stay() -> None:
        reached.set()
        go_on.wait()

    running = start(lambda: work(stay))
    assert reached.wait(PATIENCE)
    try:
        yield
    finally:
        go_on.set()
        running.result(timeout=PATIENCE)


def told_elsewhere(uses: Mapping[str, Callable[[], Any]]) -> None:
    """Check that each use of a model in this forked process is refused in that sentence, before anything has begun."""
    errors = {name: _error_of(use) for name, use in uses.items()}
    assert {name: error for name, error in errors.items() if ELSEWHERE not in str(error) or error.__context__} == {}


def _error_of(use: Callable[[], Any]) -> RuntimeError:
    try:
        use()
    except RuntimeError as error:
        return error
    return RuntimeError("none")
