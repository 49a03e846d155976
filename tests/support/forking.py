"""Forked processes, which end soon or fail."""

from __future__ import annotations

import os
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any

PATIENCE = 20
"""Seconds after which a forked process counts as deadlocked."""


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
