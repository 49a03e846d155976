"""A simulation of rows, pages, shared beginnings, states and preemption: what a load costs under a rule of admission.

It counts; nothing is computed. A step grows each row by a token, or by as much of its prompt as there is room for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from compiled_llm.engine.admission.state import Admission, AdmissionState, Counts, Requests
from support.engine.admission_loads import MAX_NUM_SEQS, PAGE_SIZE, Load

BUDGET = 8192
"""Tokens of prompts in a step."""
AGAIN = 200
"""Tokens that cost as much as a step if they are computed again."""
LASTS, SOONER = 8, 4
"""Steps for which a rule's no holds, and by how many it ends sooner for each row that gives its pages back."""
REMEMBERED = 256
"""Answers whose lengths are remembered."""


class Cost(NamedTuple):
    """What a load has cost."""

    steps: int
    again: int  # tokens that were computed again
    tokens: int  # of all prompts and answers
    preemptions: int
    most_preemptions: int  # of one request

    @property
    def total(self) -> float:
        return self.steps + self.again / AGAIN


class Rule:
    """Today's rule, with what rules remember from load to load: a promise of as much as answers had lately."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._likely = 256.0
        self.steps = 0  # of all loads that have ended

    def ended(self, simulation: Simulation, number: int) -> None:
        length = int(simulation.load.answers[number])
        self._likely += (length - self._likely) / 16
        self.lengths = [*self.lengths[1 - REMEMBERED :], length]

    def promise(self, simulation: Simulation, number: int) -> int:
        """Return how many tokens a row has to fit; 0 if it may not begin."""
        left = simulation.load.max_tokens[number] - simulation.answered[number]
        return int(simulation.text[number] + min(left, round(self._likely)) - 1)

    def victim(self, simulation: Simulation) -> int:
        priorities, length = simulation.load.priorities, simulation.length
        return max(simulation.running, key=lambda number: (priorities[number], -length[number], number))


class Vllm(Rule):
    """vLLM's: whatever fits begins, and the newest row goes first."""

    def promise(self, simulation: Simulation, number: int) -> int:
        return int(simulation.text[number])

    def victim(self, simulation: Simulation) -> int:
        running, priorities = simulation.running, simulation.load.priorities
        return max(enumerate(running), key=lambda entry: (priorities[entry[1]], entry[0]))[1]


class Oracle(Rule):
    """An oracle that knows all lengths: a request begins if all rows can grow to their ends, so none is preempted."""

    def promise(self, simulation: Simulation, number: int) -> int:
        load, state = simulation.load, simulation.state(number)
        rows = np.array([*simulation.running, number])
        tokens = np.maximum(simulation.length[rows], simulation.text[rows])
        left = (load.prompts + load.answers - 1)[rows] - tokens
        order = np.argsort(left)
        shared = np.append(state.running.shared, state.next.shared)[order]
        pages = -(-(tokens[order] + left[order, None]) // PAGE_SIZE) - shared
        return int(simulation.text[number]) if np.triu(pages).sum(1).max() <= state.pages else 0


class Asked(Rule):
    """A policy of the engine's."""

    def __init__(self, policy: Admission) -> None:
        super().__init__()
        self.policy, self.asked = policy, 0

    def promise(self, simulation: Simulation, number: int) -> int:
        self.asked += 1
        return int(simulation.text[number]) if self.policy.plan(simulation.state(number)) else 0

    def victim(self, simulation: Simulation) -> int:
        priorities, length, lost = simulation.load.priorities, simulation.length, simulation.lost
        return max(simulation.running, key=lambda i: (priorities[i], lost[i] < 2, -length[i], i))


class SimulatedState(AdmissionState):
    def __init__(self, simulation: Simulation, number: int) -> None:
        self._simulation, load = simulation, simulation.load
        running = np.array(simulation.running)
        self.step, self.page_size = simulation.rule.steps + simulation.step, PAGE_SIZE
        self.running, self.next = self._requests(running), self._requests(np.array([number]))
        owned = simulation.pages_of(running) - self.running.shared
        self.pages = int(load.pages - simulation.held + owned.sum())
        self.max_rows = MAX_NUM_SEQS if load.states is None else min(MAX_NUM_SEQS, load.states // 2)
        self.lengths = np.sort(np.array(simulation.rule.lengths, dtype=np.int64))

    @property
    def waiting(self) -> Requests:
        return self._requests(np.array(self._simulation.waiting))

    def _requests(self, numbers: Counts) -> Requests:
        simulation, load = self._simulation, self._simulation.load
        tokens = np.maximum(simulation.length[numbers], simulation.text[numbers])
        left = (load.prompts + load.max_tokens - 1)[numbers] - tokens
        held = np.array([simulation.holders.get(group, 0) > 0 for group in load.groups[numbers].tolist()], dtype=bool)
        shared = np.where(held, load.shared // PAGE_SIZE, 0)
        return Requests(
            numbers, tokens, tokens - load.prompts[numbers], left, np.full(len(numbers), load.exact), shared
        )


class Simulation:
    """One load under one rule."""

    def __init__(self, load: Load, rule: Rule) -> None:
        self.load, self.rule, count = load, rule, len(load.prompts)
        self.answered = np.zeros(count, np.int64)
        self.text = load.prompts.copy()  # what is known of a request's text when it begins
        self.length = np.zeros(count, np.int64)  # of its row
        self.promised = np.zeros(count, np.int64)  # pages
        self.lost = np.zeros(count, np.int64)  # how often its row was preempted
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.holders: dict[int, int] = {}  # rows that have a group's shared pages
        self.step = self.again = 0
        self._seen = set[int]()  # groups
        self._cached: OrderedDict[tuple[str, int], int] = OrderedDict()  # pages, the least recently used first
        self._states: OrderedDict[int, int] = OrderedDict()  # after how many tokens each is, by request
        self._no = 0, 0  # the priority of who was refused, and the step in which the rule is asked again
        self.began: list[int] = []

    def run(self) -> Cost:
        load = self.load
        coming, ended = np.argsort(load.arrivals, kind="stable").tolist(), 0
        while ended < len(load.prompts):
            while coming and load.arrivals[coming[0]] <= self.step:
                self._wait(coming.pop(0))
            if not (self.running or self.waiting):
                self.step = int(load.arrivals[coming[0]])
                continue
            decoding, whole = self._decoding_within_pages()
            chunks = self._chunks(whole)
            until = load.arrivals[coming[0]] - self.step if coming else UNBOUNDED
            steps = 1 if chunks else self._steps_alike(decoding, int(until))
            self.length[decoding] += steps
            self.answered[decoding] += steps
            for number, tokens in chunks:
                self.length[number] += tokens
                self.answered[number] += self.length[number] == self.text[number]
            self.step += steps
            self._evict()
            for number in [number for number in self.running if self.answered[number] == load.answers[number]]:
                self._retire(number)
                self.rule.ended(self, number)
                ended += 1
            assert self.held <= load.pages, "rows have more pages than there are"
        self.rule.steps += self.step
        tokens = int((load.prompts + load.answers).sum())
        return Cost(self.step, self.again, tokens, int(self.lost.sum()), int(self.lost.max()))

    def state(self, number: int) -> AdmissionState:
        return SimulatedState(self, number)

    # ---- pages

    def pages_of(self, numbers: Counts, more: Counts | int = 0) -> Counts:
        """Return the pages that rows have or were promised, if they grow by so many tokens more."""
        pages: Counts = np.maximum(self.promised[numbers], -(-(self.length[numbers] + more) // PAGE_SIZE))
        return pages

    @property
    def held(self) -> int:
        return self._held_after(0)

    def _held_after(self, steps: int) -> int:
        rows = np.array(self.running, dtype=np.int64)
        decoding = self.length[rows] >= self.text[rows]
        return int(self._own(self.pages_of(rows, decoding * steps), rows).sum()) + self._of_groups

    def _own(self, pages: Counts, rows: Counts) -> Counts:
        shared = self.load.shared // PAGE_SIZE
        return np.maximum(0, pages - shared * (self.load.groups[rows] >= 0))

    @property
    def _of_groups(self) -> int:
        return sum(map(bool, self.holders.values())) * (self.load.shared // PAGE_SIZE)

    def _evict(self) -> None:
        rows = np.array(self.running, dtype=np.int64)
        written = int(self._own(-(-self.length[rows] // PAGE_SIZE), rows).sum()) + self._of_groups
        over = written + sum(self._cached.values()) - self.load.pages
        while over > 0:
            first, pages = next(iter(self._cached.items()))
            self._cached[first] = pages - min(over, pages)
            over -= pages
            if over >= 0:
                del self._cached[first]
        if self.load.states is not None:
            while self._states and len(self._states) > self.load.states - 2 * len(self.running):
                self._states.popitem(last=False)

    def _known(self, number: int) -> int:
        """Return how many tokens of a text are in pages that its row can begin with."""
        own, group = self._cached.get(("row", number), 0), int(self.load.groups[number])
        if self.load.states is not None:
            after = self._states.get(number, 0)
            return after if own == -(-after // PAGE_SIZE) else 0
        shared = self.load.shared // PAGE_SIZE if group >= 0 else 0
        if shared and not self.holders.get(group, 0) and (there := self._cached.get(("group", group), 0)) < shared:
            return there * PAGE_SIZE
        return min(int(self.text[number] - 1) // PAGE_SIZE, shared + own) * PAGE_SIZE

    # ---- requests come and go

    def _wait(self, number: int) -> None:
        self.waiting.append(number)
        self.waiting.sort(key=lambda other: (self.load.priorities[other], other))

    def _begins(self, number: int) -> bool:
        """Give a request its row, if the rule and the room allow it."""
        load = self.load
        group = int(load.groups[number])
        if len(self.running) == MAX_NUM_SEQS:
            return False
        if load.states is not None and 2 * len(self.running) + 2 > load.states:
            return False
        if self.running and self._refuses(number):
            return False
        promise = self.rule.promise(self, number) if self.running else int(self.text[number])
        shared = load.shared // PAGE_SIZE if self.holders.get(group, 0) else 0
        if not promise or -(-promise // PAGE_SIZE) - shared > load.pages - self.held:
            self._no = int(load.priorities[number]), self.step + LASTS
            return False
        start = self._known(number)
        if self.lost[number]:
            self.again += int(self.text[number]) - start
        elif group in self._seen:
            self.again += max(0, load.shared - start)
        if group >= 0:
            self._seen.add(group)
            self._cached.pop(("group", group), None)
            self.holders[group] = self.holders.get(group, 0) + 1
        self._cached.pop(("row", number), None)
        self._states.pop(number, None)
        self.waiting.remove(number)
        self.running.append(number)
        self.began.append(number)
        self.length[number], self.promised[number] = start, -(-promise // PAGE_SIZE)
        return True

    def _refuses(self, number: int) -> bool:
        return self.step < self._no[1] and self.load.priorities[number] >= self._no[0]

    def _retire(self, number: int) -> None:
        load, group, length = self.load, int(self.load.groups[number]), int(self.length[number])
        self.running.remove(number)
        self._no = self._no[0], self._no[1] - SOONER
        pages, shared = length // PAGE_SIZE, 0
        if load.states is not None:
            self._states[number], pages = length, -(-length // PAGE_SIZE)
        if group >= 0:
            shared = load.shared // PAGE_SIZE
            self.holders[group] -= 1
        if pages > shared:
            self._cached["row", number] = pages - shared
        if group >= 0 and not self.holders[group]:
            self._cached["group", group] = min(pages, shared)
        self.length[number] = self.promised[number] = 0

    def _preempt(self) -> None:
        number = self.rule.victim(self)
        self._retire(number)
        self.lost[number] += 1
        self.text[number] = self.load.prompts[number] + self.answered[number]
        self._wait(number)

    # ---- a step

    def _decoding_within_pages(self) -> tuple[Counts, bool]:
        """Return the rows that grow by a token, and whether all rows have kept their pages."""
        whole = True
        while self._held_after(1) > self.load.pages:
            self._preempt()
            whole = False
        rows = np.array(self.running, dtype=np.int64)
        decoding = rows[self.length[rows] >= self.text[rows]]
        self.promised[decoding] = self.pages_of(decoding, 1)
        return decoding, whole

    def _chunks(self, whole: bool) -> list[tuple[int, int]]:
        room, chunks = BUDGET, list[tuple[int, int]]()
        for number in self.running:
            if (missing := int(self.text[number] - self.length[number])) > 0 and room:
                chunks.append((number, min(room, missing)))
                room -= chunks[-1][1]
        while whole and room and self.waiting and self._begins(self.waiting[0]):
            number = self.running[-1]
            chunks.append((number, min(room, int(self.text[number] - self.length[number]))))
            room -= chunks[-1][1]
        return chunks

    def _steps_alike(self, decoding: Counts, until: int) -> int:
        """Return how many steps go on alike: until a row ends, or a request comes, may begin, or loses its pages."""
        assert len(decoding), "nothing runs"
        most = min(until, int((self.load.answers - self.answered)[decoding].min()))
        if self.waiting and len(self.running) < MAX_NUM_SEQS:
            most = min(most, max(1, self._no[1] - self.step))
        least = 1
        while least < most:
            middle = (least + most + 1) // 2
            if self._held_after(middle) <= self.load.pages:
                least = middle
            else:
                most = middle - 1
        return least


UNBOUNDED = 2**40


def costs(loads: Sequence[Load], rule: Rule) -> list[Cost]:
    """Return what loads cost, one after the other."""
    return [Simulation(load, rule).run() for load in loads]
