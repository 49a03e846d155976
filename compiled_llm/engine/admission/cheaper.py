"""Admission by what it costs: the peak, or whatever fits, whichever ends a load sooner."""

from __future__ import annotations

import numpy as np

from compiled_llm.engine.admission.forecast import ExpectedLoad, Numbers, cost_of_greed, cost_of_peaks
from compiled_llm.engine.admission.lengths import drawn
from compiled_llm.engine.admission.peak import Peak
from compiled_llm.engine.admission.state import AdmissionState, Requests

_EVERY = 64
"""Steps after which both costs are estimated again."""
_MOST = 96
"""Requests that are simulated; of more, each stands for several."""
_WORTH = 0.98
"""A request begins beyond the peak only if that saves at least 2% of the cost."""


class Cheaper:
    """A policy by which a request begins if the peak allows it, or if waiting is likely to cost more than beginning.

    Waiting costs steps; beginning costs steps, too, once rows that lost their pages compute again what they had. Both
    are played forward now and then, over lengths that are drawn once for all.
    """

    def __init__(self) -> None:
        self._peak = Peak()
        self._greedy = False
        self._estimated = -_EVERY

    def plan(self, state: AdmissionState) -> bool:
        if self._peak.plan(state):
            return True
        if not 0 <= state.step - self._estimated < _EVERY:
            self._estimated = state.step
            load = load_of(state)
            self._greedy = cost_of_greed(load) < _WORTH * cost_of_peaks(load)
        return self._greedy


def load_of(state: AdmissionState) -> ExpectedLoad:
    """Return what runs and waits, with lengths that were drawn, thinned to what can be played fast."""
    running = state.running
    waiting = state.waiting
    weight = max(1.0, (len(running.tokens) + len(waiting.tokens)) / _MOST)
    run, wait = (_thinned(requests, weight) for requests in (running, waiting))
    return ExpectedLoad(
        state.pages * state.page_size / weight,
        max(1, round(state.max_rows / weight)),
        _tokens(run, state.page_size),
        drawn(run, state.lengths).astype(np.float64),
        _tokens(wait, state.page_size),
        drawn(wait, state.lengths).astype(np.float64),
        weight,
    )


def _tokens(requests: Requests, page_size: int) -> Numbers:
    own: Numbers = np.maximum(1.0, requests.tokens - requests.shared * page_size) + page_size / 2
    return own


def _thinned(requests: Requests, weight: float) -> Requests:
    count = len(requests.tokens)
    kept = np.arange(0, count, weight).astype(np.int64)
    return Requests._make(array[kept] for array in requests)
