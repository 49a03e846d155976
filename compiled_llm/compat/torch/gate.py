"""The gate of the process: what may run at once of tracing, tuning, loading kernels and capturing CUDA graphs."""

# ``torch.fx`` and Dynamo keep what they trace in flags and patches of the process, so one thread traces at a time. CUDA
# ends every capture of a device when some thread waits for all of that device, as timing a kernel's tilings does, so a
# capture, such a wait and the first run of new kernels exclude each other on a device, for all models. To build kernels
# on the CPU and to launch code that is compiled runs beside everything, and never comes here.
#
# The order of entry is trace, then tune or load, then capture: what a thread has entered never stands in its own way,
# and it asks for no trace inside one of the others. So no two threads wait for each other.

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal, ParamSpec, TypeVar

import torch

from compiled_llm.compat.condition import Condition
from compiled_llm.compat.forks import in_forked_processes
from compiled_llm.compat.torch.dynamo import dynamo_alone

P = ParamSpec("P")
T = TypeVar("T")

Activity = Literal["trace", "tune", "load", "capture"]
"""``tune`` waits for a whole device, ``load`` runs kernels for the first time."""

_ON_DEVICE: frozenset[Activity] = frozenset({"tune", "load", "capture"})

EXCLUDED: Mapping[Activity, frozenset[Activity]] = {
    "trace": frozenset({"trace"}),
    "tune": _ON_DEVICE,
    "load": _ON_DEVICE,
    "capture": _ON_DEVICE,
}
"""What no other thread does meanwhile; all but a trace on the same device."""


class Gate:
    """What threads are doing, or wait to do."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._entered: list[_Pass] = []
        self._waiting: list[_Pass] = []
        self._later: list[Callable[[], None]] = []
        self._numbers = itertools.count()

    def entered(
        self, activity: Activity, device: torch.device | None = None, finish: Callable[[], None] | None = None
    ) -> _Pass:
        """Return a context in which this thread does something; it waits until what that excludes has ended.

        Args:
            activity: what it does, none of it inside of what is later in the order of entry.
            device: where, but for a trace.
            finish: brings a capture to its end, which others that wait for it call in their threads.
        """
        return _Pass(self, activity, device, finish)

    def admits(self, activity: Activity, device: torch.device | None = None) -> bool:
        """Return whether this thread would not wait now."""
        with self._changed:
            return not self._against(_Pass(self, activity, device))

    def captures(self) -> bool:
        """Return whether some thread captures, on any device."""
        return any(each.activity == "capture" for each in list(self._entered))

    def when_nothing_is_captured(self, wait: Callable[[], None]) -> None:
        """Call what waits for a device, and must not raise: now, or in the thread that ends the last capture."""
        # The garbage collector calls this, in the midst of anything: it can wait for nobody.
        self._later.append(wait)
        self._call_later()

    def _call_later(self) -> None:
        with self._changed:  # no capture begins meanwhile
            while self._later and not self.captures():
                self._later.pop()()

    def _enter(self, own: _Pass) -> None:
        inside = {each.activity for each in list(self._entered) if each.thread == own.thread}
        assert own.activity != "trace" or inside <= {"trace"}, f"a thread traces first, and not inside {inside}"
        try:
            with self._changed:
                own.number = next(self._numbers)
                self._waiting.append(own)
            while (against := self._tried(own)) is not None:
                for finish in against:
                    finish()
        except BaseException:  # Ctrl-C, too, comes while one waits
            self._leave(own)
            raise

    def _tried(self, own: _Pass) -> list[Callable[[], None]] | None:
        """Let it in, and return None; or wait for a change; or return what finishes the captures that it waits for."""
        with self._changed:
            if not (against := self._against(own)):
                self._waiting.remove(own)
                self._entered.append(own)
                return None
            finishes = [each.finish for each in against if each.finish is not None]
            if not finishes:
                self._changed.wait()
            return finishes

    def _leave(self, own: _Pass) -> None:
        with self._changed:
            for held in (self._entered, self._waiting):
                if own in held:
                    held.remove(own)
            self._changed.notify_all()
        if self._later:
            self._call_later()

    def _against(self, own: _Pass) -> list[_Pass]:
        """Return what others do, or waited to do before, that excludes it."""
        found = [each for each in self._entered if each.excludes(own)]
        holds = any(each.thread == own.thread for each in self._entered)
        # Captures come again and again: who waits for the open one to end would wait for the next, too. A thread that
        # is inside already lets nobody in first, who would wait for it.
        return found if holds else [*found, *(each for each in self._waiting if each.goes_before(own))]

    def forget_other_threads(self) -> None:
        """Keep only what this thread does: in a forked process there is no other."""
        here = threading.get_ident()
        self._entered = [each for each in self._entered if each.thread == here]
        self._waiting = []


class _Pass:
    """One thread's activity, as a context."""

    activity: Activity

    def __init__(
        self,
        gate: Gate,
        activity: Activity,
        device: torch.device | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.activity, self.finish = activity, finish
        if device is not None and device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._gate, self._device = gate, device
        self.thread, self.number = threading.get_ident(), -1

    def excludes(self, other: _Pass) -> bool:
        at_once = other.activity not in EXCLUDED[self.activity] or self.thread == other.thread
        return not at_once and self._device == other._device

    def goes_before(self, other: _Pass) -> bool:
        """Whether another one waits until this one, which waits as well, has had its turn."""
        return self.number >= 0 and (other.number < 0 or self.number < other.number) and self.excludes(other)

    def __enter__(self) -> None:
        self.thread = threading.get_ident()
        self._gate._enter(self)

    def __exit__(self, *error: object) -> None:
        self._gate._leave(self)


GATE = Gate()
"""The one of this process."""

in_forked_processes(GATE.forget_other_threads)


@contextmanager
def tracing() -> Iterator[None]:
    """Trace and compile in the block, as the only thread of ours, and of the user's, that Dynamo works for."""
    with GATE.entered("trace"), dynamo_alone():
        yield


def loading(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which kernels run that may never have run, on a CUDA device where nothing is captured."""
    return GATE.entered("load", device) if device.type == "cuda" else nullcontext()


def wait_for_device(device: torch.device) -> None:
    """Wait for all that a CUDA device does, on all streams; captures of all threads end first."""
    if device.type == "cuda":
        with GATE.entered("tune", device):
            torch.cuda.synchronize(device)


def tuned_alone(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that times kernels on the current CUDA device, where nothing is captured meanwhile."""

    @functools.wraps(function)
    def tuned(*args: P.args, **kwargs: P.kwargs) -> T:
        with GATE.entered("tune", torch.device("cuda", torch.cuda.current_device())):
            return function(*args, **kwargs)

    return tuned
