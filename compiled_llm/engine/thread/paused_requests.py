"""Requests on their way to the scheduler: those that come while weights are about to change begin with the new ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.thread.arrivals import Arrivals


class PausedRequests:
    """Requests that are kept from the scheduler until earlier ones have ended, if it is paused."""

    def __init__(self, arrivals: Arrivals, known: Iterable[Request]) -> None:
        self._arrivals = arrivals
        self._known = known
        self._early: frozenset[Request] | None = None
        self._late: list[Request] = []

    def arrive(self, requests: Sequence[Request]) -> None:
        """Hand requests over now, or once an update has ended; RuntimeError if the engine is closed."""
        if (early := self._early) is not None:
            with self._arrivals.changed:
                if self._early is early:
                    self._late += (request for request in requests if request not in early)
                    requests = [request for request in requests if request in early]
        self._arrivals.send(lambda loop: loop.scheduler.add_all(requests))

    def begin(self) -> list[Request]:
        """Keep later requests, and return earlier ones that have not ended; RuntimeError if it does already."""
        with self._arrivals.changed:
            if self._early is not None:
                raise RuntimeError("update_weights: another update is in progress; wait until it has ended")
            early = list(self._known)
            self._early = frozenset(early)
            return early

    def pop_overdue(self, now: float) -> list[Request]:
        """Remove and return kept requests whose deadline is before ``now`` on ``time.monotonic``'s clock."""
        with self._arrivals.changed:
            overdue = [request for request in self._late if request.deadline is not None and request.deadline <= now]
            self._late = [request for request in self._late if request not in overdue]
            return overdue

    def end(self) -> None:
        """Hand over all that were kept."""
        with self._arrivals.changed:
            late, self._early, self._late = self._late, None, []
            if late and not self._arrivals.closed:
                self.arrive(late)
