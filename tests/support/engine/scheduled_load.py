"""The engine's scheduler over a load of numbers: rows grow by what it plans, and nothing is computed."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

import numpy as np

from compiled_llm.engine.admission.state import Admission, AdmissionState
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.kvcache.pool import PagePool, StatePool
from compiled_llm.kvcache.prefix_tree import PrefixTree
from support.engine.admission_loads import MAX_NUM_SEQS, PAGE_SIZE, Load
from support.engine.admission_simulation import BUDGET, Cost

GOES_ON, STOPS = 1, 2


class Recounted:
    """A policy that compares what another is told with what it counts itself."""

    def __init__(self, policy: Admission) -> None:
        self.policy, self.scheduler = policy, Scheduler(PagePool(2, 1), 1, lambda *_: 1)

    def plan(self, state: AdmissionState) -> bool:
        scheduler, pool = self.scheduler, self.scheduler._pool
        rows = [request.running_row for request in scheduler.running]
        request = scheduler._queue.ready[0]
        owners = Counter(page for row in scheduler.rows for page in row.pages)
        assert state.pages == pool.total - sum(count > 1 for count in owners.values()), "pages"
        alike = [sum(1 for _ in takewhile(lambda page: owners[page] > 1, row.pages)) for row in rows]
        numbers = [request.arrival for request in scheduler.running]
        told = zip(state.running.numbers.tolist(), state.running.shared.tolist(), strict=True)
        assert sorted(told) == sorted(zip(numbers, alike, strict=True)), "shared"
        states = len(rows) if pool.states is None else pool.states.available // 2
        room = MAX_NUM_SEQS if pool.states is None else min(MAX_NUM_SEQS, len(rows) + states)
        assert state.max_rows == room, "states"
        lengths = [max(len(each.known), each.running_row.length_at_most) for each in scheduler.running]
        assert sorted(state.running.tokens.tolist()) == sorted(lengths)
        stored = [len(each.prompt) + each.max_tokens - 1 for each in scheduler.running]
        assert sorted((state.running.tokens + state.running.left).tolist()) == sorted(stored), "what is left"
        assert (state.next.tokens.item(), state.waiting.tokens[0]) == (len(request.text), len(request.text))
        assert len(state.waiting.tokens) == len(scheduler.waiting)
        return self.policy.plan(state)


def requests_of(load: Load, rng: np.random.Generator) -> list[Request]:
    beginnings = [rng.integers(3, 1000, load.shared) for _ in range(int(load.groups.max()) + 1)]
    requests = []
    for number, length in enumerate(load.prompts.tolist()):
        prompt = rng.integers(3, 1000, length)
        if (group := load.groups[number]) >= 0:
            prompt[: load.shared] = beginnings[group]
        requests.append(
            Request(
                prompt=prompt,
                sampling=None,
                max_tokens=int(load.max_tokens[number]),
                stop_token_ids=frozenset([STOPS]),
                known_length=load.exact,
                priority=int(load.priorities[number]),
                arrival=number,
            )
        )
    return requests


def run(load: Load, policy: Admission, seed: int = 0) -> Cost:
    """Return what a load has cost, whose answers end where it says so."""
    states = None if load.states is None else StatePool(load.states)
    pool = PagePool(load.pages + 1, PAGE_SIZE, states=states)
    scheduler = Scheduler(pool, MAX_NUM_SEQS, lambda *_: BUDGET, PrefixTree(pool), admission=policy)
    if isinstance(policy, Recounted):
        policy.scheduler = scheduler
    requests = requests_of(load, np.random.default_rng(seed))
    answers = dict(zip(requests, load.answers.tolist(), strict=True))
    began: dict[Request, None] = {}
    coming, steps, again = sorted(zip(load.arrivals.tolist(), requests, strict=True), key=lambda each: each[0]), 0, 0
    while coming or not scheduler.idle:
        while coming and coming[0][0] <= steps:
            scheduler.add(coming.pop(0)[1])
        plan = scheduler.plan()
        if not plan.requests:
            assert scheduler.idle, "a deadlock"
            steps += 1
            continue
        for request in plan.decode:
            request.running_row.grow(1)
        for chunk in plan.extend:
            began[chunk.request] = None
            again += len(chunk.ids) if chunk.request.preemptions else 0
            chunk.request.running_row.grow(len(chunk.ids))
        scheduler.launched(plan)
        sampled = plan.sampled
        tokens = [STOPS if len(request.tokens) + 1 == answers[request] else GOES_ON for request in sampled]
        scheduler.read(sampled, tokens, now=float(steps))
        steps += 1
    assert [len(request.tokens) for request in requests] == load.answers.tolist()
    account = pool.account()
    assert (account.used, pool.available) == (0, account.total), "pages are lost"
    if states is None:  # else some wait for what another is about to compute
        for priority in {request.priority for request in requests}:
            order = [request.arrival for request in began if request.priority == priority]
            assert order == sorted(order), "a request has been passed over"
    most = max(request.preemptions for request in requests)
    return Cost(steps, again, int((load.prompts + load.answers).sum()), scheduler.preemptions, most)
