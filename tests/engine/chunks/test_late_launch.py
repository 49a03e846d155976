"""The next step is launched so late that requests which come meanwhile run in it."""

from __future__ import annotations

import threading
import time

import pytest

import compiled_llm
from compiled_llm.engine.chunks.stretched import Stretched
from compiled_llm.engine.steps import loop
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.steps.plan import StepPlan
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.engine.steps.timing import late_launch
from compiled_llm.engine.steps.timing.late_launch import LateLaunch
from compiled_llm.engine.thread.arrivals import Arrivals, Changed
from compiled_llm.execution.state.device_timer import DeviceTimer
from compiled_llm.execution.state.staging import Readback
from compiled_llm.requests.handle import RequestHandle
from support.engine.tiny_engines import PATIENCE, greedy, wrapped


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that ``LateLaunch`` reads."""
    now = [100.0]
    monkeypatch.setattr(late_launch, "time", type("", (), {"perf_counter": staticmethod(lambda: now[0])}))
    return now


def test_a_launch_is_due_before_the_end_of_the_step_that_runs(clock: list[float]) -> None:
    late = LateLaunch()
    assert late.due(0.005) == 0.0, "nothing is known of the first step"
    late.read(True, ran_prompts=False)
    assert late.due(0.005) == pytest.approx(100.0 + 0.005 - 0.0008)
    assert late.due(0.020) == pytest.approx(100.0 + 0.018), "long steps are not all alike"
    assert late.due(0.002) == 0.0, "short steps end too soon"
    late.forget()
    assert late.due(0.005) == 0.0


def test_launches_that_come_too_late_come_sooner_and_later_again(clock: list[float]) -> None:
    late = LateLaunch()
    for _ in range(3):
        late.read(False, ran_prompts=False)
        assert late.due(0.005) == 0.0, "nobody knows when the step that runs has begun"
    late.read(True, ran_prompts=False)
    assert late.due(0.005) == pytest.approx(100.005 - 0.998 * 0.0008 * 1.5**3)
    for _ in range(20):
        late.read(False, ran_prompts=True)  # of the prompts' launch nothing is learnt
    for _ in range(1000):
        late.read(True, ran_prompts=False)
    assert late.due(0.005) == pytest.approx(100.005 - 0.0008)
    for _ in range(100):
        late.read(False, ran_prompts=False)
    late.read(True, ran_prompts=False)
    assert late.due(0.005) < 100.0, "at once"


def test_a_request_that_comes_meanwhile_runs_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[list[int]] = []
    came: list[tuple[int, RequestHandle]] = []
    note, waits = Scheduler.launched, Changed.wait_before

    def launched(self: Scheduler, plan: StepPlan) -> list[Request]:
        plans.append([len(chunk.ids) for chunk in plan.extend])
        return note(self, plan)

    def wait(self: Changed, due: float) -> None:
        if len(plans) > 30 and not came:
            came.append((len(plans), engine.submit([7] * 11, greedy(3))))
        waits(self, min(due, time.perf_counter() + 0.001))

    monkeypatch.setattr(Scheduler, "launched", launched)
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: True))
    monkeypatch.setattr(Changed, "wait_before", wait)
    monkeypatch.setattr(Readback, "arrived", property(lambda _: False))
    monkeypatch.setattr(DeviceTimer, "seconds", property(lambda _: 0.01))
    monkeypatch.setattr(loop, "chunks_of", lambda *_: Stretched())
    with compiled_llm.Engine(wrapped()) as engine:
        first = engine.submit([3, 4, 5], greedy(60))
        first.when_changed(lambda: None)
        first.result(PATIENCE)
        ((number, second),) = came
        assert len(second.result(PATIENCE).token_ids) == 3
    assert plans[number] == [11]


@pytest.mark.parametrize("follows", [False, True])
def test_nothing_waits_without_somebody_who_follows(follows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(Loop, "asynchronous", property(lambda _: True))
    monkeypatch.setattr(Changed, "wait_before", lambda _, due: waited.append(due))
    monkeypatch.setattr(Readback, "arrived", property(lambda _: False))
    monkeypatch.setattr(DeviceTimer, "seconds", property(lambda _: 0.01))
    monkeypatch.setattr(loop, "chunks_of", lambda *_: Stretched())
    with compiled_llm.Engine(wrapped()) as engine:
        handle = engine.submit([3, 4, 5], greedy(60))
        if follows:
            handle.when_changed(lambda: None)
        handle.result(PATIENCE)
    assert bool(waited) == follows


def test_a_change_ends_the_wait() -> None:
    changed = Arrivals().changed
    changed.seen = True
    waiting = threading.Thread(target=changed.wait_before, args=[time.perf_counter() + 10 * PATIENCE])
    waiting.start()
    with changed:
        changed.notify_all()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    changed.wait_before(time.perf_counter() + 10 * PATIENCE)  # there is something to be seen
