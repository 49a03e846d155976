"""Asks the policy of admission, and tells it of requests, rows and pages."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

import numpy as np

from compiled_llm.engine.admission.state import Admission, AdmissionState, Counts, Requests, joined
from compiled_llm.engine.steps.queue import Queue
from compiled_llm.engine.steps.request import Request
from compiled_llm.kvcache.pool import ENTRIES_OF_A_ROW, PagePool
from compiled_llm.kvcache.row import Row

_REMEMBERED = 256
"""Answers whose lengths the policy knows."""
_LASTS, _SOONER = 8, 4
"""Steps for which a refusal holds, and by how many it ends sooner for each row that gives its pages back."""
_COUNTED_AGAIN = 40
"""Steps after which pages that rows share are counted again."""


class Admissions:
    """An engine's policy of admission, with what it is told, and its last refusal."""

    def __init__(self, policy: Admission, pool: PagePool, max_num_seqs: int) -> None:
        self.policy, self._pool, self._max_num_seqs = policy, pool, max_num_seqs
        self._next_count = 0
        self._ended: deque[int] = deque(maxlen=_REMEMBERED)
        self._lengths = np.zeros(0, np.int64)  # of these, sorted; empty until they are wanted
        self._shared: dict[Request, int] = {}  # pages of running requests that others have, too
        self._last: _SchedulerState | None = None  # of the last request, which was allowed
        self._refused = self._until = 0  # the priority of a request that did not begin, and for how long that holds

    def ended(self, request: Request) -> None:
        """Learn how long an answer was."""
        self._ended.append(len(request.tokens))
        self._lengths = np.zeros(0, np.int64)

    def gave_back(self, request: Request) -> None:
        """Hear that a request's row gives its pages back."""
        self._shared.pop(request, None)
        self._until -= _SOONER
        self._last = None

    def refuse(self, request: Request, step: int) -> None:
        """Remember that a request does not begin."""
        self._refused, self._until, self._last = request.priority, step + _LASTS, None

    def refuses(self, request: Request, step: int) -> bool:
        """Whether it, or another that is as urgent, was refused, and that holds."""
        return step < self._until and request.priority >= self._refused

    def allow(self, request: Request, row: Row, running: Sequence[Request], queue: Queue, step: int) -> bool:
        """Return whether a request begins, whose row has the pages that are known of it; others run."""
        state = _SchedulerState(queue, request, self._shared_pages(row))
        state.step, state.page_size, state.lengths = step, self._pool.page_size, self._lengths_sorted()
        state.max_rows = self._max_rows(len(running))
        if (last := self._last) is not None and last.step == step and last.request.row is not None:
            self._count_on(state, last, row)
        else:
            self._count(state, running, row)
        begins = self.policy.plan(state)
        self._last = state if begins else None
        return begins

    def _count(self, state: _SchedulerState, running: Sequence[Request], row: Row) -> None:
        """Count what running requests have, one by one."""
        state.begun, rows = _Begun(running), [each.running_row for each in running]
        shared = self._shared_by(running, row, state.next.shared.item(), state.step)
        own = sum([each.held for each in rows]) - sum(shared) + len(row.pages)
        state.pages = self._pool.available + own - state.next.shared.item()
        lengths = [
            min(each.stored, max(len(each.known), one.length_at_most)) for each, one in zip(running, rows, strict=True)
        ]
        state.running = _requests(running, lengths, shared)

    def _count_on(self, state: _SchedulerState, last: _SchedulerState, row: Row) -> None:
        """Count on from the ``last`` state: its next request has begun, and nothing else has changed."""
        last.begun.requests.append(last.request)
        state.begun, state.running, state.pages = last.begun, joined(last.running, last.next), last.pages
        if not (shared := state.next.shared.item()):
            return
        counts = state.running.shared
        for place in state.begun.places_like(row):
            if counts[place] < shared:  # it has more in common with others now
                other = state.begun.requests[place]
                more = self._shared_pages(other.running_row)
                state.pages -= more - int(counts[place])
                counts[place] = self._shared[other] = more

    def _lengths_sorted(self) -> Counts:
        if not len(self._lengths):
            self._lengths = np.sort(np.array(self._ended, np.int64))
        return self._lengths

    def _max_rows(self, running: int) -> int:
        """Return how many requests may run at once, with these."""
        more, states = self._max_num_seqs - running, self._pool.states
        return running + (more if states is None else min(more, states.available // ENTRIES_OF_A_ROW))

    def _shared_by(self, running: Sequence[Request], row: Row, shared: int, step: int) -> list[int]:
        """Return how many pages of running rows others have, too; a new row has ``shared`` pages of theirs."""
        if step >= self._next_count:
            self._next_count = step + _COUNTED_AGAIN
            self._shared.clear()
        for request in running:
            known = self._shared.get(request)
            if known is None or (known < shared and request.running_row.pages[:1] == row.pages[:1]):
                self._shared[request] = self._shared_pages(request.running_row)
        return [self._shared[request] for request in running]

    def _shared_pages(self, row: Row) -> int:
        """Return how many of a row's pages, which are its first ones, other rows have, too."""
        return bisect_left(row.pages, True, key=self._pool.has_one_row)


class _Begun:
    """Requests that run, found by the first page of their rows."""

    # A request that begins has its pages before the next one is looked at, or has none that others could find.

    def __init__(self, requests: Iterable[Request]) -> None:
        self.requests = list(requests)
        self._places: defaultdict[int, list[int]] = defaultdict(list)
        self._found = 0  # how many requests are there

    def places_like(self, row: Row) -> list[int]:
        """Return the places of those whose rows begin with the same page as another."""
        for place in range(self._found, len(self.requests)):
            for page in self.requests[place].running_row.pages[:1]:
                self._places[page].append(place)
        self._found = len(self.requests)
        return self._places[row.pages[0]]


class _SchedulerState(AdmissionState):
    begun: _Begun  # those that run, in the order of ``running``

    def __init__(self, queue: Queue, request: Request, shared: int) -> None:
        self.request = request
        self._queue, self._shared = queue, shared
        self.next = _requests([request], [_known(request)], [shared])

    @property
    def waiting(self) -> Requests:
        others = [request for request in self._queue if request is not self.request]
        requests, shared = [self.request, *others], [self._shared, *map(self._shared_soon, others)]
        return _requests(requests, list(map(_known, requests)), shared)

    def _shared_soon(self, request: Request) -> int:
        """Estimate how many pages a request will find that other rows have."""
        filled = (len(request.prompt) - 1) // self.page_size
        if request.prefix_owner is not None:
            return filled
        size = self.page_size
        alike = self._shared and np.array_equal(request.prompt[:size], self.request.prompt[:size])
        return min(self._shared, filled) if alike else 0


def _known(request: Request) -> int:
    return len(request.prompt) + len(request.tokens)


def _requests(requests: Sequence[Request], tokens: Sequence[int], shared: Sequence[int]) -> Requests:
    """Return requests as arrays, whose rows have so many tokens, and so many pages in common with others."""
    facts = [(each.arrival, len(each.prompt), each.max_tokens, each.known_length) for each in requests]
    numbers, prompts, most, known = np.array(facts, np.int64).reshape(-1, 4).T
    begun = np.array(tokens, np.int64)
    left = prompts + np.maximum(most, 1) - 1 - begun
    return Requests(numbers, begun, begun - prompts, left, known > 0, np.array(shared, np.int64))
