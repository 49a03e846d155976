"""The policy of admission in an engine that runs a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiled_llm.engine.admission.cheaper import Cheaper
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.admission.state import AdmissionState, Counts, Requests
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.admission_loads import PAGE_SIZE, Load
from support.engine.admission_simulation import Asked, costs
from support.engine.tiny_engines import wrapped
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.usefixtures("one_thread")

COUNT = 32
"""Requests of a load."""
PAGES = 56
STOPS = [3, 50, 99]
"""Tokens of which one comes after 40 others, more or less."""
Questions = list[tuple[list[int], SamplingParams]]


@pytest.mark.whole
@pytest.mark.parametrize("exact", [True, False])
def test_the_engine_runs_as_many_steps_as_the_simulation(
    seed: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 2%, over two loads, the second of which knows the lengths of the first."""
    loads = [drawn(seed + part, exact) for part in range(2)]
    if exact:
        answers = [[params.max_tokens for _, params in load] for load in loads]
    else:  # tokens follow from a request's seed, with room and without
        with Engine(wrapped(8000, page_size=PAGE_SIZE)) as engine:
            answers = [lengths(engine, load) for load in loads]
    simulated = costs([load_of(*load, exact) for load in zip(loads, answers, strict=True)], Asked(Cheaper()))
    model = wrapped(PAGES * PAGE_SIZE, page_size=PAGE_SIZE)
    monkeypatch.setitem(POLICIES, "auto", Renumbered)
    with Engine(model) as engine:
        for load, known, expected in zip(loads, answers, simulated, strict=True):
            before = engine.stats()
            assert lengths(engine, load) == known
            after = engine.stats()
            steps, preemptions = after.steps - before.steps, after.preemptions - before.preemptions
            print(expected, f"in the engine: {steps} steps, {preemptions} preemptions")
            assert abs(steps - expected.steps) <= 0.02 * expected.steps
    assert_account_is_empty(model)


def drawn(seed: int, exact: bool) -> Questions:
    """Return requests whose lengths are known, or whose answers end at tokens that stop them."""
    rng = np.random.default_rng(seed)
    load: Questions = []
    for number in range(COUNT):
        prompt = rng.integers(4, 120, rng.integers(10, 61)).tolist()
        most, stops = (int(rng.integers(10, 101)), None) if exact else (120, STOPS)
        params = SamplingParams(max_tokens=most, ignore_eos=True, stop_token_ids=stops, seed=COUNT * seed + number)
        load.append((prompt, params))
    return load


def lengths(engine: Engine, load: Questions) -> list[int]:
    """Return how many tokens each answer has."""
    outputs = engine.generate([prompt for prompt, _ in load], [params for _, params in load])
    return [len(output.token_ids) for output in outputs]


def load_of(load: Questions, answers: list[int], exact: bool) -> Load:
    prompts, most = (np.array(each) for each in ([len(ids) for ids, _ in load], [own.max_tokens for _, own in load]))
    zeros = np.zeros(COUNT, np.int64)
    return Load(prompts, np.array(answers), most, exact, zeros, zeros, zeros - 1, 0, PAGES, None)


class Renumbered:
    """The engine's own policy, told of requests by their numbers in a load: what it draws depends on them."""

    def __init__(self) -> None:
        self._own, self._first = Cheaper(), -1

    def plan(self, state: AdmissionState) -> bool:
        if self._first < 0:
            self._first = int(state.running.numbers.min())
        return self._own.plan(_Renumbered(state, lambda numbers: (numbers - self._first) % COUNT))


class _Renumbered(AdmissionState):
    def __init__(self, state: AdmissionState, number: Callable[[Counts], Counts]) -> None:
        self._state, self._number, self.step, self.page_size = state, number, state.step, state.page_size
        self.pages, self.max_rows, self.lengths = state.pages, state.max_rows, state.lengths
        self.running, self.next = self._of_load(state.running), self._of_load(state.next)

    @property
    def waiting(self) -> Requests:
        return self._of_load(self._state.waiting)

    def _of_load(self, requests: Requests) -> Requests:
        return requests._replace(numbers=self._number(requests.numbers))


@pytest.mark.parametrize("admission", ["sum", None, Cheaper()])
def test_what_is_no_policy_is_refused(admission: Any) -> None:
    with pytest.raises(ValueError, match=r"admission=.*: give one of auto, peak, greedy$"):
        Engine(wrapped(100), admission=admission)
