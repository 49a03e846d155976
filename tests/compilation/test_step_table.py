"""Steps change their states, and CUDA graphs make room for others, as a naive model says; nothing is a CUDA graph."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import Phase, StepKey
from compiled_llm.compilation.graphs.step_table import ATTEMPTS, UNBOUNDED, Budget, Cost, StepEntry, StepTable
from compiled_llm.compilation.graphs.table import CudaGraphTable, StepState
from compiled_llm.execution.reporting.events import Events
from compiled_llm.execution.steps.launch import Launch

DECODES = [StepKey.decode(rows) for rows in (1, 2, 4, 8)]
SEVERAL = [StepKey.decode(2, 2), StepKey.decode(4, 2), StepKey.decode(8, 2), StepKey.decode(1, 3), StepKey.decode(4, 3)]
PREFILLS = [StepKey.prefill(16, 2), StepKey.prefill(16, 2, 1), StepKey.prefill(32, 2), StepKey.prefill(64, 8)]
CHOICES = [StepKey.sampling(4, False), StepKey.sampling(4, True)]
PHASES: list[Phase] = ["decode", "prefill", "sampling"]
KEYS = [*DECODES, *SEVERAL, *PREFILLS, *CHOICES]
ANCHORS = {StepKey.decode(8): 0, StepKey.decode(8, 2): 0, StepKey.prefill(64, 8): 0, StepKey.prefill(16, 2): 1}
SHARED = 100


class Fake:
    """A graph that knows whether it runs."""

    def __init__(self) -> None:
        self.running = self.released = False

    outputs = StepOutputs(torch.empty(0), torch.empty(0), {})

    def launch(self) -> None:
        assert not self.released
        self.running = True

    def release(self) -> None:
        assert not self.running, "it is in flight"
        assert not self.released
        self.released = True


def replayed(entry: StepEntry[Any]) -> StepOutputs:
    return Launch(entry.key, entry.key, entry, Events())()


def size_of(key: StepKey) -> tuple[int, ...]:
    return key.tokens, key.rows, -key.variant


def is_decode_of(key: StepKey, new_tokens: int) -> bool:
    return key.phase == "decode" and key.tokens == new_tokens * key.rows


class Machine(RuleBasedStateMachine):
    """The naive model is a list of keys, the least recently used first, and what each takes."""

    budget = Budget()

    def __init__(self) -> None:
        super().__init__()
        ticks = itertools.count()
        self.graphs: list[Fake] = []
        self.table = StepTable(self.budget, self.wait, lambda: float(next(ticks)), self.mark)
        self.leaving: list[tuple[Fake, int]] = []  # evicted ones that are not released, and what they take
        self.table.anchors |= {
            "decode": [StepKey.decode(8)],
            "prefill": [StepKey.prefill(64, 8), StepKey.prefill(16, 2)],
        }
        self.dropped: list[StepKey] = []
        self.table.when_dropped.append(self.dropped.append)
        self.used: list[StepKey] = []
        self.states: dict[StepKey, StepState] = dict.fromkeys(KEYS, "missing")
        self.losses: Counter[StepKey] = Counter()
        self.failures: Counter[StepKey] = Counter()
        self.in_turn: Counter[StepKey] = Counter()
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
        entry = self.table.get(victim)
        assert entry is not None
        self.leaving.append((entry.cuda_graph, self.sizes[victim]))

    def fits(self, more: int = 0, nbytes: int = 0) -> bool:
        limit, most = self.budget
        taken = self.shared + sum(self.sizes[key] for key in self.used) + nbytes
        return (most is None or len(self.used) + more <= most) and (limit is None or taken <= limit)

    def staying(self, new: StepKey) -> set[StepKey]:
        """Those in which all others can run: anchors, or without any the largest, for each number of new tokens."""
        found = set()
        for alike in (PREFILLS, *([key for key in KEYS if is_decode_of(key, tokens)] for tokens in (1, 2, 3))):
            keys = [key for key in (*self.used, new) if key in alike]
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
            self.states[victim] = "evicted"
            self.counts[victim][1] += 1
        return victim is not None

    @rule(data=st.data())
    def some_end(self, data: st.DataObject) -> None:
        """Those that were launched first; what was evicted before and has ended goes, in the order of evictions."""
        running = [graph for graph in self.graphs if graph.running]
        for graph in running[: data.draw(st.integers(0, len(running)))]:
            graph.running = False
        left = self.table.release_ended()
        self.leaving = [(graph, size) for graph, size in self.leaving if not graph.released]
        assert left == (not self.leaving)
        assert self.table.releases_later == (not left)
        assert not self.leaving or any(graph.running for graph in self.graphs)

    @rule(key=st.sampled_from(KEYS), size=st.integers(0, 5))
    def want(self, key: StepKey, size: int) -> None:
        entry = self.table.get(key)
        assert (entry is not None) == (key in self.used)
        if entry is not None:
            self.used.append(self.used.pop(self.used.index(key)))
            self.counts[key][2] += 1
            assert replayed(entry) is Fake.outputs
        else:
            self.capture(key, size)

    def capture(self, key: StepKey, size: int) -> None:
        if self.states[key] != "capturing":
            self.table.begin(key)
        self.states[key] = "ready"
        self.in_turn[key] = 0
        while not self.fits(1, self.sizes.get(key, 0)) and self.evict(key):
            pass
        self.table.make_room(key)
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
            self.table.add(key, graph, cost, "steps")
        else:
            least = self.shared + sum(self.sizes[key] for key in self.used)
            self.used.remove(key)
            self.states[key] = "evicted"
            with pytest.raises(ValueError, match=f"give at least graph_memory={least}$"):
                self.table.add(key, graph, cost, "steps")

    def in_a_state(self, *states: StepState) -> list[StepKey]:
        return [key for key in KEYS if self.states[key] in states]

    @precondition(lambda self: len(self.used) < len(KEYS))
    @rule(data=st.data())
    def a_program_is_compiled(self, data: st.DataObject) -> None:
        """Of what is known of a step, that it is compiled is the least."""
        key = data.draw(st.sampled_from([key for key in KEYS if key not in self.used]))
        self.table.compiled(key)
        if self.states[key] in ("missing", "stale"):
            self.states[key] = "compiled"

    @rule(key=st.sampled_from(KEYS))
    def a_capture_begins(self, key: StepKey) -> None:
        if self.states[key] in ("capturing", "ready"):
            with pytest.raises(AssertionError, match=f"{self.states[key]}, and cannot become capturing"):
                self.table.begin(key)
        else:
            self.table.begin(key)
            self.states[key] = "capturing"

    @precondition(lambda self: self.in_a_state("capturing"))
    @rule(data=st.data(), fails=st.booleans())
    def a_capture_ends_without_a_graph(self, data: st.DataObject, fails: bool) -> None:
        key = data.draw(st.sampled_from(self.in_a_state("capturing")))
        if fails:
            self.table.fail(key)
            self.failures[key] += 1
            self.in_turn[key] += 1
            self.states[key] = "failed" if self.in_turn[key] >= ATTEMPTS else "compiled"
        else:
            self.table.give_up(key)
            self.states[key] = "compiled"

    @rule(data=st.data())
    def nothing_ends_that_has_not_begun(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([key for key in KEYS if self.states[key] != "capturing"]))
        self.table.entry(key)
        for end in (self.table.fail, self.table.give_up):
            with pytest.raises(AssertionError, match="cannot become"):
                end(key)

    @precondition(lambda self: self.in_a_state("capturing"))
    @rule(data=st.data(), size=st.integers(0, 5))
    def captured_beside(self, data: st.DataObject, size: int) -> None:
        """It is kept if those make room that nobody needs."""
        key = data.draw(st.sampled_from(self.in_a_state("capturing")))
        self.states[key] = "ready"
        self.in_turn[key] = 0
        nbytes = self.sizes.get(key, 0)
        assert self.table.has_room_for(key) == self.would_fit(key, nbytes)
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
            self.states[victim] = "evicted"
            self.counts[victim][1] += 1
        if not fits:
            self.used.remove(key)
            self.states[key] = "evicted"
            self.counts[key][1] += 1
        assert self.table.try_to_add(key, graph, cost, "steps") == fits

    def would_fit(self, key: StepKey, nbytes: int) -> bool:
        limit, most = self.budget
        left = [other for other in self.used if other not in self.going(key)]
        taken = self.shared + sum(self.sizes[other] for other in left) + nbytes
        return (most is None or len(left) < most) and (limit is None or taken <= limit)

    @rule(phases=st.sets(st.sampled_from(PHASES), min_size=1))
    def the_model_changes(self, phases: set[Phase]) -> None:
        """Graphs of some phases are dropped, and nothing is launched any more; then they are captured again."""
        self.wait()
        self.table.forget(*phases)
        self.leaving = []
        for key in KEYS:
            if key.phase in phases:
                self.in_turn[key] = 0
                self.losses[key] += key in self.used
                self.states[key] = "stale" if key in self.used or self.states[key] == "stale" else "missing"
        self.used = [key for key in self.used if key.phase not in phases]
        if not self.used:
            self.table.shared["steps"] = self.shared = 0

    @invariant()
    def both_say_the_same(self) -> None:
        assert sorted(map(str, self.table.of("decode", "prefill", "sampling"))) == sorted(map(str, self.used))
        assert sum(not graph.released for graph in self.graphs) == len(self.used) + len(self.leaving)
        kept = self.shared + sum(self.sizes[key] for key in self.used)
        assert self.table.nbytes == kept + sum(size for _, size in self.leaving)
        assert not self.used or self.fits()
        assert {key: self.table.state(key) for key in KEYS} == self.states
        assert {key: entry.losses for key, entry in self.table.entries.items() if entry.losses} == +self.losses
        table = self.table.table()
        assert {row.state for row in table} <= set(get_args(StepState))
        assert all(
            row.state == self.states[StepKey.numbered(row.phase, row.tokens, row.rows, row.variant)] for row in table
        )
        assert sum(row.failures for row in table) == self.failures.total()
        assert all(row.captures or row.failures for row in table), "what was never to be captured is not shown"
        assert (table.nbytes, table.shared_bytes, table.ready) == (self.table.nbytes, self.shared, len(self.used))
        counts = sorted((row.captures, row.evictions, row.replays) for row in table if row.captures)
        assert counts == sorted(map(tuple, self.counts.values()))
        assert all(row.capture_seconds == 0.5 * row.captures for row in table)
        assert len(self.dropped) == table.captures - table.ready


def machine(budget: Budget) -> Any:
    made = type("Bounded", (Machine,), {"budget": budget}).TestCase
    made.settings = settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=40)
    return made


TestUnbounded = machine(Budget())
TestAFew = pytest.mark.whole(machine(Budget(max_graphs=2)))
TestSome = pytest.mark.whole(machine(Budget(max_graphs=4)))
TestMemory = pytest.mark.whole(machine(Budget(nbytes=SHARED + 9)))
TestBoth = machine(Budget(nbytes=SHARED + 14, max_graphs=5))


def filled(*keys: StepKey, budget: Budget = UNBOUNDED, replays: int = 0) -> StepTable:
    table = StepTable(budget)
    for key in keys:
        table.begin(key)
        table.make_room(key)
        table.add(key, Fake(), Cost(2**20, 2**20, 0.25), "steps")
        for _ in range(replays):
            entry = table.get(key)
            assert isinstance(entry, StepEntry)
            replayed(entry)
    return table


def test_a_step_of_several_tokens_a_row_has_an_anchor_of_its_own() -> None:
    """The one of one token does not stand in for it; the largest of as many does."""
    table = filled(StepKey.decode(8), StepKey.decode(4, 2), budget=Budget(max_graphs=2))
    table.anchors["decode"] = [StepKey.decode(8)]
    assert not table.has_room_for(StepKey.decode(2))
    assert not table.has_room_for(StepKey.decode(2, 2))
    assert not table.has_room_for(StepKey.decode(2, 3)), "it could run in neither, and neither in it"
    assert table.has_room_for(StepKey.decode(8, 2)), "4 rows can run in 8"
    table.begin(StepKey.decode(8, 2))
    assert table.try_to_add(StepKey.decode(8, 2), Fake(), Cost(), "steps")
    assert table.of("decode") == [StepKey.decode(8), StepKey.decode(8, 2)]


def test_the_anchor_of_several_tokens_a_row_is_evicted_last() -> None:
    table = filled(StepKey.decode(8, 2), StepKey.decode(4, 2), budget=Budget(max_graphs=2))
    table.anchors["decode"] = [StepKey.decode(8)]
    table.begin(StepKey.decode(2, 2))
    table.make_room(StepKey.decode(2, 2))
    assert table.of("decode") == [StepKey.decode(8, 2)], "although it was used before the other"


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
        == "phase tokens rows variant state memory captures evictions replays misses idle cost"
    )
    assert " ".join(lines[2].split()) == "prefill 64 8 1 ready 1.0 MiB 1 0 3 0 0.0 s 0.25 s"
    assert summary == "5 ready; 10.0 MiB, 5.0 MiB of them shared; 5 captures, 0 evictions, 0 misses"
    assert len(table) == 5
    first = table.as_dicts()[0]
    assert first["phase"] == "decode"
    assert first["replays"] == 3
    assert set(first) == {*vars(table.rows[0]), "ready"}


def test_an_evicted_graph_stays_in_the_table():
    table = filled(StepKey.decode(1), StepKey.decode(2), StepKey.prefill(16, 2), budget=Budget(2**30, 2)).table()
    evicted = table.rows[0]
    assert (evicted.ready, evicted.state, evicted.nbytes, evicted.evictions) == (False, "evicted", 0, 1)
    assert "2 ready of at most 2; 5.0 MiB of at most 1,024.0 MiB" in str(table)
    assert str(table).endswith("3 captures, 1 evictions, 0 misses")


def test_an_empty_table_is_one_line():
    assert str(CudaGraphTable()) == "0 ready; 0.0 MiB, 0.0 MiB of them shared; 0 captures, 0 evictions, 0 misses"
    assert CudaGraphTable().as_dicts() == []


# ---- states and transitions

STATES: dict[StepState, tuple[str, ...]] = {  # and how a step gets there
    "missing": (),
    "compiled": ("compiled",),
    "capturing": ("begin",),
    "ready": ("begin", "add"),
    "stale": ("begin", "add", "forget"),
    "failed": ("begin", "fail") * ATTEMPTS,
    "evicted": ("begin", "add", "evict"),
}
ALLOWED: dict[str, dict[StepState, StepState]] = {
    "compiled": {**{state: state for state in STATES}, "missing": "compiled", "stale": "compiled"},
    "begin": dict.fromkeys(("missing", "compiled", "stale", "failed", "evicted"), "capturing"),
    "give_up": {"capturing": "compiled"},
    "fail": {"capturing": "compiled"},  # the first time
    "add": {"capturing": "ready"},
    "evict": {"ready": "evicted"},
    "forget": {**dict.fromkeys(STATES, "missing"), "ready": "stale", "stale": "stale"},
}


def moved(table: StepTable, step: StepKey, transition: str) -> None:
    match transition:
        case "add":
            table.add(step, Fake(), Cost(), "steps")
        case "evict":
            table._evict(table.entry(step))
        case "forget":
            table.forget(step.phase)
        case _:
            getattr(table, transition)(step)


@pytest.mark.parametrize("transition", ALLOWED)
@pytest.mark.parametrize("state", STATES)
def test_a_step_changes_its_state_by_these_transitions_alone(state: StepState, transition: str) -> None:
    table, step = StepTable(), StepKey.decode(4)
    table.entry(step)
    for earlier in STATES[state]:
        moved(table, step, earlier)
    assert table.state(step) == state
    if state in ALLOWED[transition]:
        moved(table, step, transition)
        assert table.state(step) == ALLOWED[transition][state]
        assert (table.get(step) is None) == (table.state(step) != "ready")
    else:
        with pytest.raises(AssertionError):
            moved(table, step, transition)
        assert table.state(step) == state


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_capture_that_raises_leaves_a_step_that_can_be_captured_again(error: type[BaseException]) -> None:
    table, step = StepTable(), StepKey.decode(4)
    with pytest.raises(error), table.capturing(step):
        raise error
    assert (table.state(step), table.table().failures) == ("compiled", 0)
    with table.capturing(step):
        table.add(step, Fake(), Cost(), "steps")
    assert table.state(step) == "ready"
