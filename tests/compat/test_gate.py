"""What may run at once: every two activities in two threads, in both orders, over a device that forgives nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from compiled_llm.compat.torch import capturing, gate as gates
from compiled_llm.compat.torch.gate import Activity, Gate
from support.in_threads import in_thread, start

pytestmark = pytest.mark.core

FIRST, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
ALL: tuple[Activity, ...] = ("trace", "tune", "load", "capture")
EXCLUDED = {"trace": {"trace"}, **{activity: {*ALL[1:]} for activity in ALL[1:]}}
"""As `docs/design/threads.md` has it."""


@pytest.fixture
def gate() -> Gate:
    return Gate()


class Device:
    """One that waits for nothing while a capture is open, and ends the capture then, as CUDA does."""

    def __init__(self) -> None:
        self.open = self.waits = 0
        self.traces = 0
        self.broken: list[str] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        with self._lock:
            self._count(activity, 1)
            if self.open > 1 or (self.open and self.waits) or self.traces > 1:
                self.broken.append(f"{activity}: {self.open} captures, {self.waits} waits, {self.traces} traces")
        try:
            yield
        finally:
            with self._lock:
                self._count(activity, -1)

    def _count(self, activity: Activity, by: int) -> None:
        if activity == "capture":
            self.open += by
        elif activity == "trace":
            self.traces += by
        else:
            self.waits += by


class SlicedCapture:
    """One that goes on only when it is told to finish, as in time slices that a loop gives no more."""

    def __init__(self) -> None:
        self.told = threading.Event()

    def finish(self) -> None:
        self.told.set()


@pytest.mark.parametrize("device", [FIRST, OTHER], ids=["same device", "another"])
@pytest.mark.parametrize(("first", "second"), [*itertools.product(ALL, ALL)])
def test_two_threads_do_at_once_what_the_table_says(
    gate: Gate, first: Activity, second: Activity, device: torch.device
) -> None:
    entered, leave, began = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with gate.entered(first, FIRST if first != "trace" else None):
            entered.set()
            assert leave.wait(60)

    def follow() -> None:
        with gate.entered(second, device if second != "trace" else None):
            began.set()

    excluded = second in EXCLUDED[first] and (device == FIRST or first == "trace")
    holder = start(hold)
    assert entered.wait(60)
    assert gate.admits(second, device if second != "trace" else None) is not excluded
    follower = start(follow)
    assert began.wait(0.05 if excluded else 60) is not excluded
    leave.set()
    holder.result()
    follower.result()
    assert began.is_set()
    assert all(gate.admits(activity, FIRST) for activity in ALL)


@pytest.mark.parametrize("second", ["tune", "load", "capture"])
def test_who_needs_the_device_finishes_an_open_capture_first_and_none_begins_meanwhile(
    gate: Gate, second: Activity
) -> None:
    capture, entered, admitted = SlicedCapture(), threading.Event(), []

    def hold() -> None:
        with gate.entered("capture", FIRST, capture.finish):
            entered.set()
            assert capture.told.wait(60)
            admitted.append(in_thread(lambda: gate.admits("capture", FIRST)))

    holder = start(hold)
    assert entered.wait(60)
    with gate.entered(second, FIRST):
        assert capture.told.is_set()
    holder.result()
    assert admitted == [False]


def enter_and_leave(gate: Gate, activity: Activity) -> None:
    with gate.entered(activity, FIRST):
        pass


def test_what_a_thread_has_entered_is_not_in_its_own_way(gate: Gate) -> None:
    """To compile times kernels, which captures them; others that wait to capture are not let in before."""
    began: list[threading.Thread] = []
    with gate.entered("trace"):
        with gate.entered("trace"), gate.entered("load", FIRST), gate.entered("tune", FIRST):
            began.append(threading.Thread(target=enter_and_leave, args=(gate, "capture")))
            began[0].start()
            while not gate._waiting:
                time.sleep(0.001)
            with gate.entered("capture", FIRST):
                assert gate.captures()
        began[0].join(60)
        assert not began[0].is_alive()
    with pytest.raises(AssertionError, match="a thread traces first"), gate.entered("tune", FIRST):
        gate.entered("trace").__enter__()


@pytest.mark.parametrize("activity", ALL)
def test_who_is_interrupted_while_waiting_is_in_nobodys_way(gate: Gate, activity: Activity) -> None:
    device = None if activity == "trace" else FIRST
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with gate.entered(activity, device):
            entered.set()
            leave.wait(60)

    holder = start(hold)
    assert entered.wait(60)
    main = threading.get_ident()
    timer = threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        gate.entered(activity, device).__enter__()
    leave.set()
    holder.result()
    assert [*gate._waiting, *gate._entered] == []


def test_threads_that_do_everything_at_random_break_no_capture(gate: Gate, seed: int) -> None:
    device = Device()

    def work(number: int) -> None:
        chance = random.Random(seed * 100 + number)
        for _ in range(60):
            activity = chance.choice(ALL)
            with gate.entered(activity, None if activity == "trace" else FIRST), device.doing(activity):
                if activity == "trace" and chance.random() < 0.5:
                    with gate.entered("tune", FIRST), device.doing("tune"):
                        time.sleep(0.0001)
                time.sleep(0.0001)

    workers = [start(lambda number=number: work(number)) for number in range(4)]
    for worker in workers:
        worker.result()
    assert device.broken == []
    assert [*gate._waiting, *gate._entered] == []


class Captured:
    """A graph whose capture is nothing, or is broken."""

    def __init__(self, error: str = "") -> None:
        self._error = error

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        pass

    def capture_end(self) -> None:
        if self._error:
            raise RuntimeError(self._error)

    def reset(self) -> None:
        pass

    def replay(self) -> None:
        pass


def captured(launch: Callable[[], Any], error: str = "") -> Any:
    return capturing.captured_into(Captured(error), (0, 1), FIRST, launch)


def test_a_capture_that_another_thread_broke_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *given: None, raising=False)
    own, others = (
        "operation not permitted when stream is capturing",
        "operation failed due to a previous error during capture",
    )
    with pytest.raises(capturing.CaptureBrokenError):
        captured(lambda: None, f"CUDA error 901: {others}")
    with pytest.raises(RuntimeError, match="not permitted") as raised:
        captured(lambda: None, f"CUDA error 900: {own}")
    assert not isinstance(raised.value, capturing.CaptureBrokenError)
    capturing._ended_badly.clear()


# ---- what waits for a device, and comes from the garbage collector


def test_who_waits_for_the_device_is_called_when_no_thread_captures() -> None:
    called: list[str] = []
    later = gates.GATE.when_nothing_is_captured

    def launch() -> int:
        later(lambda: called.append("by the thread that captures"))
        in_thread(lambda: later(lambda: called.append("by another one")))
        captured(lambda: None)  # its end is not that of the last one
        assert not called
        return 7

    later(lambda: called.append("before"))
    assert called == ["before"]
    called.clear()
    assert captured(launch) == 7
    assert sorted(called) == ["by another one", "by the thread that captures"]

    def fail() -> None:
        launch()
        raise ValueError("no launch")

    called.clear()
    with pytest.raises(ValueError, match="no launch"):
        captured(fail)
    assert len(called) == 2


def test_no_capture_begins_while_somebody_waits_for_the_device() -> None:
    """Four threads capture and wait; what the garbage collector calls may come in the midst of either."""
    captures, waits, overlaps = list[int](), list[int](), list[int]()
    later = gates.GATE.when_nothing_is_captured

    def wait(depth: int = 0) -> None:
        waits.append(1)
        if depth == 0:
            later(lambda: wait(1))
        time.sleep(0.0002)
        overlaps.extend(captures)
        waits.pop()

    def launch() -> None:
        captures.append(1)
        overlaps.extend(waits)
        time.sleep(0.0002)
        captures.pop()

    def work() -> None:
        for _ in range(50):
            captured(launch)
            later(wait)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not overlaps
    assert not gates.GATE._later


def test_a_forked_process_does_not_wait_for_threads_of_its_parent() -> None:
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with gates.GATE.entered("trace"), gates.GATE.entered("load", FIRST), gates.GATE._changed:
            held.set()
            forked.wait(60)

    holder = start(hold)
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)  # it would wait for ever
        gates.GATE.when_nothing_is_captured(lambda: None)
        with gates.GATE.entered("trace"), gates.GATE.entered("capture", FIRST):
            os._exit(0)
    forked.set()
    holder.result()
    assert os.waitpid(child, 0)[1] == 0
