"""The import of torch and transformers, which takes seconds, and which Ctrl-C may come into."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from compiled_llm.execution.reporting.progress import ProgressDisplay

IMPORTING = "importing torch and transformers"

_INTERRUPTED = 128 + signal.SIGINT


@contextmanager
def importing(progress: bool) -> Iterator[None]:
    """Show on stderr that the block imports torch and transformers; Ctrl-C ends the process at once meanwhile."""
    with ProgressDisplay(progress).task(IMPORTING), ended_by_ctrl_c():
        yield


@contextmanager
def ended_by_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the process at once, with 130, while the block imports modules and has nothing to clean up."""
    # A KeyboardInterrupt inside an import becomes whatever the modules at hand make of it: C extensions drop it, and
    # transformers goes on for seconds and then says that it lacks a class. In other threads, and where another handler
    # is set, nothing changes.
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    # Not by ``sys.stderr``, which the block may be in the midst of writing to. The first shows the cursor again.
    os.write(2, b"\x1b[?25h\n" if os.isatty(2) else b"\n")
    os._exit(_INTERRUPTED)
