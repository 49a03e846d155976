"""The C++ compilers that Inductor starts: Ctrl-C does not end them, unless it ends the compile that waits for them."""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from subprocess import CalledProcessError

from compiled_llm.compat.signals import interrupts_blocked

_MORE_TRIES = 2


def compilers_uninterrupted() -> AbstractContextManager[None]:
    """Keep a terminal's Ctrl-C, which all of its processes get, from those that this thread starts."""
    # In the main thread it goes on to end them, as it ends what waits for them.
    return nullcontext() if threading.current_thread() is threading.main_thread() else interrupts_blocked()


@functools.cache
def compile_to_the_end() -> None:
    """Let Ctrl-C end no compiler of Inductor's that another thread than the main one starts, in its pools too."""
    # One that a signal has ended nevertheless runs again: Inductor keeps the failure of a thread of its pool, and would
    # raise it again for the same kernel as long as the process lives. Ends when Inductor keeps Ctrl-C from them.
    from torch._inductor import cpp_builder

    run = cpp_builder.run_compile_cmd

    @functools.wraps(run)
    def run_to_the_end(*args: str, **kwargs: str) -> None:
        with compilers_uninterrupted():
            for _ in range(_MORE_TRIES):
                try:
                    run(*args, **kwargs)
                except RuntimeError as error:
                    if not _ended_by_signal(error):
                        raise
                else:
                    return
            run(*args, **kwargs)

    setattr(cpp_builder, "run_compile_cmd", run_to_the_end)  # noqa: B010


def _ended_by_signal(error: RuntimeError) -> bool:
    """Whether a signal has ended the compiler, or what it had started."""
    ended = error.__cause__
    if not isinstance(ended, CalledProcessError):
        return False
    return ended.returncode < 0 or b" signal terminated program " in (ended.stdout or b"")
