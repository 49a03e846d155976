"""Ops that a capture may leave out: it ends before such an op, goes on after it, and the op is launched each time."""

# So ops that cannot be captured, because they wait for the device or have another grid for each batch, still run
# between captured launches.

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Arguments = TypeVar("Arguments", bound=tuple[Any, ...])


class Divided(Protocol):
    """A capture that can be interrupted."""

    def leave_out(self, launch: Callable[[Any], Any], arguments: Any, allocate: Callable[[Any], Any]) -> Any:
        """End here, begin again, and return tensors by ``allocate``, to which ``launch``, not called now, writes."""
        # ``arguments``, a NamedTuple, have tensors that lie at the same addresses each time.
        ...


class _Thread(threading.local):
    """The capture of this thread, if it can be interrupted."""

    capture: Divided | None = None


_thread = _Thread()


def capture_of_this_thread(capture: Divided | None) -> None:
    """Let ops that this thread calls be left out of ``capture``; None once it has ended."""
    _thread.capture = capture


def may_be_left_out(
    launch: Callable[[Arguments], Any], allocate: Callable[[Arguments], Any]
) -> Callable[[Arguments], Any]:
    """Return a kernel that launches, unless a capture leaves it out; arguments as of ``Divided.leave_out``."""

    def launch_unless_left_out(arguments: Arguments) -> Any:
        capture = _thread.capture
        return launch(arguments) if capture is None else capture.leave_out(launch, arguments, allocate)

    return launch_unless_left_out
