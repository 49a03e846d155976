"""Requests in random order over a device whose pages are poisoned, and what a scheduler does with single steps."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import initialize, precondition, rule

from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.steps.plan import StepPlan
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.engine.steps.token_log import TokenLog
from compiled_llm.kvcache.pool import PagePool
from support.engine.crowd import Crowd, PlantedError, prompts

pytestmark = pytest.mark.core


class Shortage(Crowd):
    """A load that is known beforehand, some with states of recurrent layers, and pages for 0.3 to 1.2 of it."""

    fail = change_weights = admit_none_or_again = time_passes = None  # type: ignore[assignment]

    @initialize(
        load=st.lists(st.tuples(prompts, st.integers(4, 24)), min_size=8, max_size=16),
        share=st.sampled_from([0.3, 0.3, 0.4, 0.5, 0.75, 1.2]),
        size=st.integers(1, 4),
        rows=st.integers(4, 16),
        budget=st.integers(4, 40),
        late=st.booleans(),
        policy=st.sampled_from(sorted(POLICIES)),
        states=st.sampled_from([None, None, 0.3, 0.5, 1.2]),
    )
    def start(self, load, share, size, rows, budget, late, policy, states):  # type: ignore[no-untyped-def, override]
        self.load = load
        pages = [-(-(len(prompt) + most - 1) // size) for prompt, most in load]
        enough = max(*pages, int(share * sum(pages)))
        entries = None if states is None else max(2, int(states * 2 * len(load)))
        super().start(enough, size, rows, budget, True, late, policy, entries)

    @precondition(lambda self: self.load)
    @rule(
        count=st.integers(1, 8),
        seed=st.none() | st.integers(0, 200),
        priority=st.integers(0, 1),
        stops=st.sampled_from([False, False, True]),
    )
    def add(self, count, seed, priority, stops):  # type: ignore[no-untyped-def, override]
        for _ in range(min(count, len(self.load))):
            prompt, most = self.load.pop()
            super().add(prompt, most, 1, seed, False, priority, None, None, stops, late=False)

    def teardown(self) -> None:
        if hasattr(self, "load"):
            self.add(len(self.load), None, 0, stops=False)
        super().teardown()


def launch(scheduler: Scheduler) -> StepPlan:
    """Have all rows of the next plan grow, as a device would."""
    plan = scheduler.plan()
    for request in plan.decode:
        request.running_row.grow(1)
    for chunk in plan.extend:
        chunk.request.running_row.grow(len(chunk.ids))
    scheduler.launched(plan)
    return plan


def test_a_request_whose_last_token_is_lost_waits_again():
    scheduler = Scheduler(PagePool(9, 4), 2, lambda *_: 100)
    request = Request(prompt=np.array([1, 2, 3]), sampling=None, max_tokens=2, stop_token_ids=frozenset())
    scheduler.add(request)
    lost = [*launch(scheduler).sampled, *launch(scheduler).sampled]
    assert lost == [request, request]
    assert request.row is None, "its pages are given back when its last token is sampled"
    assert scheduler.idle
    scheduler.restart(lost)
    assert scheduler.waiting == [request]
    for token in (7, 8):
        scheduler.read(launch(scheduler).sampled, [token], now=0.0)
    assert (request.tokens, request.finish_reason) == ([7, 8], "length")
    scheduler.restart(lost)
    assert scheduler.idle, "it has ended"


def test_a_request_that_comes_is_in_the_next_plan():
    scheduler = Scheduler(PagePool(99, 4), 3, lambda *_: 100)
    first, second = (
        Request(prompt=np.arange(5), sampling=None, max_tokens=50, stop_token_ids=frozenset()) for _ in range(2)
    )
    scheduler.add(first)
    plans = [launch(scheduler) for _ in range(6)]
    assert plans[-1] is plans[-2], "the same plan holds"
    scheduler.add(second)
    plan = launch(scheduler)
    assert (plan.decode, [chunk.request for chunk in plan.extend]) == ([first], [second])
    launch(scheduler)
    assert launch(scheduler).decode == [first, second]
    scheduler.end(first, "cancelled")
    assert launch(scheduler).decode == [second]


class TestCrowd(Crowd.TestCase):  # type: ignore[misc]
    settings = settings(derandomize=True, deadline=None, max_examples=25, stateful_step_count=30)


class TestShortage(Shortage.TestCase):  # type: ignore[misc]
    settings = settings(derandomize=True, deadline=None, max_examples=15, stateful_step_count=20)


@pytest.mark.whole
class TestLargeShortage(Shortage.TestCase):  # type: ignore[misc]
    settings = settings(deadline=None, max_examples=800, stateful_step_count=60, database=None)


@pytest.mark.whole
class TestLargeCrowd(Crowd.TestCase):  # type: ignore[misc]
    settings = settings(deadline=None, max_examples=500, stateful_step_count=100, database=None)


def test_the_first_token_and_last_that_could_not_be_read_is_sampled_again():
    crowd = Crowd()
    crowd.start(pages=9, size=4, rows=2, budget=12, caches=False, late=True, policy="greedy")
    crowd.add([5, 6, 7], 1, 1, None, False, 0, None, None, stops=False, late=False)
    (request,) = crowd.requests
    crowd.device.arrived = True
    crowd.loop.step()
    crowd.device.faults = {"read": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        crowd.loop.read_first_tokens()
    crowd.loop.restart()
    crowd.step(3, arrived=True)
    assert (request.tokens, request.finish_reason) == crowd.expected[request]


@pytest.mark.parametrize("place", ["run", "written"])
def test_pages_of_a_plan_that_failed_are_not_begun_with(place):
    """Two requests share what neither has computed."""
    crowd = Crowd()
    crowd.start(pages=9, size=2, rows=3, budget=12, caches=True, late=False, policy="greedy")
    for _ in range(2):
        crowd.add([0, 1, 2, 3, 0], 2, 1, None, False, 0, None, None, stops=False, late=False)
    crowd.device.faults = {place: PlantedError()}
    with pytest.raises(PlantedError):
        crowd.loop.step()
    assert [request.running_row.exact_length for request in crowd.requests] == [0, 4], (
        "one begins with the other's pages"
    )
    crowd.loop.restart()
    crowd.step(3, arrived=True)
    assert crowd.scheduler.cached_tokens == 4
    for request in crowd.requests:
        assert (request.tokens, request.finish_reason) == crowd.expected[request]


def two_that_go_on() -> tuple[Scheduler, list[Request], list[int]]:
    """Two requests, whose tokens are read from the log of a plan that holds."""
    scheduler = Scheduler(PagePool(9, 64), 3, lambda *_: 100)
    requests = [
        Request(prompt=np.arange(5), sampling=None, max_tokens=50, stop_token_ids=frozenset()) for _ in range(2)
    ]
    scheduler.add_all(requests)
    for step in range(6):
        scheduler.read(launch(scheduler).sampled, [step, 10 + step], now=0.0)
    assert scheduler._log is not None
    assert len(scheduler._log.steps) == 4, "the prompts' step and the first one that decodes are read one by one"
    return scheduler, requests, [0, 1, 2, 3, 4, 5]


def test_a_request_that_has_ended_gets_no_token_of_a_step_that_still_runs():
    scheduler, (first, second), tokens = two_that_go_on()
    running = launch(scheduler).sampled
    scheduler.end(first, "cancelled")
    assert scheduler.read(running, [6, 16], now=0.0) == [second]
    assert (first.tokens, second.tokens) == (tokens, [10 + token for token in [*tokens, 6]])


def test_a_step_without_a_token_for_one_request_gives_the_others_theirs():
    scheduler, (first, second), tokens = two_that_go_on()
    scheduler.read(launch(scheduler).sampled, [NOT_A_TOKEN, 16], now=0.0)
    assert (first.tokens, first.finish_reason) == (tokens, "error")
    assert (second.tokens, second.finish_reason) == ([10 + token for token in [*tokens, 6]], None)


def test_threads_that_read_a_request_at_once_find_each_token_once():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(6):
            request = Request(prompt=np.arange(5), sampling=None, max_tokens=50, stop_token_ids=frozenset())
            log, barrier = TokenLog([]), threading.Barrier(4)
            request.follow(log, 0)
            for token in range(20_000):
                log.take([token])
            readers = [
                threading.Thread(target=lambda request=request, barrier=barrier: (barrier.wait(), request.tokens))
                for _ in range(4)
            ]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
            assert request.tokens == list(range(20_000))
    finally:
        sys.setswitchinterval(interval)
