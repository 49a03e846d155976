"""CUDA graphs make room for others as a naive model says; nothing here is a CUDA graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from compiled_llm.compilation.graphs.rolling import (
    UNBOUNDED,
    Budget,
    Cost,
    GraphEntry,
    RollingCudaGraphs,
)
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.table import CudaGraphTable

DECODES = [StepKey.decode(rows) for rows in (1, 2, 4, 8)]
PREFILLS = [StepKey.prefill(16, 2), StepKey.prefill(16, 2, 1), StepKey.prefill(32, 2), StepKey.prefill(64, 8)]
CHOICES = [StepKey.sampling(4, False), StepKey.sampling(4, True)]
KEYS = [*DECODES, *PREFILLS, *CHOICES]
ANCHORS = {StepKey.decode(8): 0, StepKey.prefill(64, 8): 0, StepKey.prefill(16, 2): 1}
SHARED = 100


class Fake:
    """A graph that knows whether it runs."""

    def __init__(self) -> None:
        self.running = self.released = False

    def replay(self) -> str:
        assert not self.released
        self.running = True
        return "outputs"

    def release(self) -> None:
        assert not self.running, "it is in flight"
        assert not self.released
        self.released = True


def size_of(key: StepKey) -> tuple[int, ...]:
    return key.tokens, key.rows, -key.variant


class Machine(RuleBasedStateMachine):
    """The naive model is a list of keys, the least recently used first, and what each takes."""

    budget = Budget()

    def __init__(self) -> None:
        super().__init__()
        ticks = itertools.count()
        self.graphs: list[Fake] = []
        self.rolling = RollingCudaGraphs(self.budget, self.wait, lambda: float(next(ticks)), self.mark)
        self.leaving: list[tuple[Fake, int]] = []  # evicted ones that are not released, and what they take
        self.rolling.anchors |= {
            "decode": [StepKey.decode(8)],
            "prefill": [StepKey.prefill(64, 8), StepKey.prefill(16, 2)],
        }
        self.dropped: list[StepKey] = []
        self.rolling.when_dropped.append(self.dropped.append)
        self.used: list[StepKey] = []
        self.sizes: dict[StepKey, int] = {}
        self.counts: dict[StepKey, list[int]] = {}  # captures, evictions, replays
        self.shared = 0

    def wait(self) -> None:
        for graph in self.graphs:
            graph.running = False

    def mark(self) -> Callable[[], bool]:
        launched = [graph for graph in self.graphs if graph.running]
        return lambda: not any(graph.running for graph in launched)

    def leaves(self, victim: StepKey) -> None:
        entry = self.rolling.get(victim)
        assert entry is not None
        self.leaving.append((entry.cuda_graph, self.sizes[victim]))

    def fits(self, more: int = 0, nbytes: int = 0) -> bool:
        limit, most = self.budget
        taken = self.shared + sum(self.sizes[key] for key in self.used) + nbytes
        return (most is None or len(self.used) + more <= most) and (limit is None or taken <= limit)

    def staying(self, new: StepKey) -> set[StepKey]:
        """Those in which all others can run: anchors, or if there are none the largest decode step and prefill."""
        found = set()
        for phase in ("decode", "prefill"):
            keys = [key for key in (*self.used, new) if key.phase == phase]
            anchors = [key for key in keys if key in ANCHORS]
            found |= set(anchors or ([max(keys, key=size_of)] if keys else []))
        return found

    def going(self, new: StepKey) -> list[StepKey]:
        """Those that any step can do without."""
        return [key for key in self.used if key not in {new, *self.staying(new)}]

    def beside(self, new: StepKey) -> set[StepKey]:
        """What runs in one step with a new one: the latest of the other phase."""
        phases = {"decode", "prefill"} - {new.phase}
        return {next((key for key in reversed(self.used) if key.phase == phase), new) for phase in phases}

    def evict(self, new: StepKey) -> bool:
        """Evict the least recently used one, the anchors last, of these the least important first."""
        others = [key for key in self.used if key not in {new, *self.beside(new)}]
        ranks = {key: ANCHORS.get(key, 9) for key in others}
        victim = max(others, key=lambda key: ranks[key], default=None)  # the first of those of one rank
        if victim is not None:
            self.used.remove(victim)
            self.counts[victim][1] += 1
        return victim is not None

    @rule(data=st.data())
    def some_end(self, data: st.DataObject) -> None:
        """Those that were launched first; what was evicted before and has ended goes, in the order of evictions."""
        running = [graph for graph in self.graphs if graph.running]
        for graph in running[: data.draw(st.integers(0, len(running)))]:
            graph.running = False
        left = self.rolling.release_ended()
        self.leaving = [(graph, size) for graph, size in self.leaving if not graph.released]
        assert left == (not self.leaving)
        assert self.rolling.releases_later == (not left)
        assert not self.leaving or any(graph.running for graph in self.graphs)

    @rule(key=st.sampled_from(KEYS), size=st.integers(0, 5))
    def want(self, key: StepKey, size: int) -> None:
        entry = self.rolling.get(key)
        assert (entry is not None) == (key in self.used)
        if entry is not None:
            self.used.append(self.used.pop(self.used.index(key)))
            self.counts[key][2] += 1
            assert entry.replay() == "outputs"
        else:
            self.capture(key, size)

    def capture(self, key: StepKey, size: int) -> None:
        while not self.fits(1, self.sizes.get(key, 0)) and self.evict(key):
            pass
        self.rolling.make_room(key)
        assert all(graph.released for graph, _ in self.leaving), "it may need their memory"
        self.leaving = []
        graph, cost = Fake(), Cost(size, SHARED - self.shared if self.shared < SHARED else 0, 0.5)
        self.graphs.append(graph)
        self.shared = SHARED
        self.used.append(key)
        self.sizes[key] = size
        self.counts.setdefault(key, [0, 0, 0])[0] += 1
        while not self.fits() and self.evict(key):
            pass
        if self.fits():
            self.rolling.add(key, graph, cost, "steps")
        else:
            least = self.shared + sum(self.sizes[key] for key in self.used)
            self.used.remove(key)
            with pytest.raises(ValueError, match=f"give at least graph_memory={least}$"):
                self.rolling.add(key, graph, cost, "steps")

    @precondition(lambda self: len(self.used) < len(KEYS))
    @rule(data=st.data(), size=st.integers(0, 5))
    def captured_beside(self, data: st.DataObject, size: int) -> None:
        """It is kept if those make room that nobody needs."""
        key = data.draw(st.sampled_from([key for key in KEYS if key not in self.used]))
        nbytes = self.sizes.get(key, 0)
        assert self.rolling.has_room_for(key) == self.would_fit(key, nbytes)
        graph, cost = Fake(), Cost(size, SHARED - self.shared, 0.5)
        self.graphs.append(graph)
        self.shared = SHARED
        self.sizes[key] = size
        self.counts.setdefault(key, [0, 0, 0])[0] += 1
        fits = self.would_fit(key, size)
        self.used.append(key)
        while fits and not self.fits():
            victim = self.going(key)[0]
            self.leaves(victim)
            self.used.remove(victim)
            self.counts[victim][1] += 1
        if not fits:
            self.used.remove(key)
            self.counts[key][1] += 1
        assert self.rolling.try_to_add(key, graph, cost, "steps") == fits

    def would_fit(self, key: StepKey, nbytes: int) -> bool:
        limit, most = self.budget
        left = [other for other in self.used if other not in self.going(key)]
        taken = self.shared + sum(self.sizes[other] for other in left) + nbytes
        return (most is None or len(left) < most) and (limit is None or taken <= limit)

    @precondition(lambda self: self.used)
    @rule()
    def sleep(self) -> None:
        """All are dropped, and nothing is launched any more; awake, they are captured again when they are wanted."""
        self.wait()
        self.rolling.drop(list(self.used))
        self.leaving = []
        self.rolling.shared["steps"] = self.shared = 0
        self.used = []

    @invariant()
    def both_say_the_same(self) -> None:
        assert sorted(map(str, self.rolling.of("decode", "prefill", "sampling"))) == sorted(map(str, self.used))
        assert sum(not graph.released for graph in self.graphs) == len(self.used) + len(self.leaving)
        kept = self.shared + sum(self.sizes[key] for key in self.used)
        assert self.rolling.nbytes == kept + sum(size for _, size in self.leaving)
        assert not self.used or self.fits()
        table = self.rolling.table()
        assert (table.nbytes, table.shared_bytes, table.ready) == (self.rolling.nbytes, self.shared, len(self.used))
        counts = sorted((row.captures, row.evictions, row.replays) for row in table)
        assert counts == sorted(map(tuple, self.counts.values()))
        assert all(row.capture_seconds == 0.5 * row.captures for row in table)
        assert len(self.dropped) == table.captures - table.ready


def machine(budget: Budget) -> Any:
    made = type("Bounded", (Machine,), {"budget": budget}).TestCase
    made.settings = settings(derandomize=True, deadline=None, max_examples=25, stateful_step_count=40)
    return made


TestUnbounded = machine(Budget())
TestAFew = machine(Budget(max_graphs=2))
TestSome = machine(Budget(max_graphs=4))
TestMemory = machine(Budget(nbytes=SHARED + 9))
TestBoth = machine(Budget(nbytes=SHARED + 14, max_graphs=5))


def filled(*keys: StepKey, budget: Budget = UNBOUNDED, replays: int = 0) -> RollingCudaGraphs:
    rolling = RollingCudaGraphs(budget)
    for key in keys:
        rolling.make_room(key)
        rolling.add(key, Fake(), Cost(2**20, 2**20, 0.25), "steps")
        for _ in range(replays):
            entry = rolling.get(key)
            assert isinstance(entry, GraphEntry)
            entry.replay()
    return rolling


def test_the_table_shows_each_graph_and_their_sums():
    table = filled(
        StepKey.decode(4),
        StepKey.prefill(64, 8, 1),
        StepKey.sampling(4, True),
        StepKey.sampling(4, False),
        StepKey.decode(1),
        replays=3,
    ).table()
    assert [row.phase for row in table] == ["decode", "decode", "prefill", "sampling", "sampling"]
    assert [(row.tokens, row.rows, row.variant) for row in table] == [
        (1, 1, 0),
        (4, 4, 0),
        (64, 8, 1),
        *[(4, 4, 0), (4, 4, 1)],
    ]
    heading, *lines, summary = str(table).splitlines()
    assert (
        " ".join(heading.split())
        == "phase tokens rows variant ready memory captures evictions replays misses idle cost"
    )
    assert " ".join(lines[2].split()) == "prefill 64 8 1 yes 1.0 MiB 1 0 3 0 0.0 s 0.25 s"
    assert summary == "5 ready; 10.0 MiB, 5.0 MiB of them shared; 5 captures, 0 evictions, 0 misses"
    assert len(table) == 5
    first = table.as_dicts()[0]
    assert first["phase"] == "decode"
    assert first["replays"] == 3
    assert set(first) == set(vars(table.rows[0]))


def test_an_evicted_graph_stays_in_the_table():
    table = filled(StepKey.decode(1), StepKey.decode(2), StepKey.prefill(16, 2), budget=Budget(2**30, 2)).table()
    evicted = table.rows[0]
    assert (evicted.ready, evicted.nbytes, evicted.evictions) == (False, 0, 1)
    assert "2 ready of at most 2; 5.0 MiB of at most 1,024.0 MiB" in str(table)
    assert str(table).endswith("3 captures, 1 evictions, 0 misses")


def test_an_empty_table_is_one_line():
    assert str(CudaGraphTable()) == "0 ready; 0.0 MiB, 0.0 MiB of them shared; 0 captures, 0 evictions, 0 misses"
    assert CudaGraphTable().as_dicts() == []
