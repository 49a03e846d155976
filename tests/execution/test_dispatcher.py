"""What runs for a step that is wanted, whatever has been compiled, captured, evicted, dropped or has failed by then."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.step_table import ATTEMPTS, Budget, Cost, StepTable
from compiled_llm.execution.steps import steps as execution
from compiled_llm.execution.steps.dispatcher import Dispatch, Dispatcher

MOST, SIMPLEST, PADDING = 16, 0, 60
DECODES = [StepKey.decode(rows) for rows in (2, 4, 8, 16)]
OF_TWO_TOKENS = [step._replace(tokens=2 * step.rows) for step in DECODES]
PREFILLS = [StepKey.prefill(*sizes) for sizes in itertools.product((16, 64, 128), (2, 8), (SIMPLEST, 1))]
KEYS = [*DECODES, *OF_TWO_TOKENS, *PREFILLS]


def graph() -> Any:
    return SimpleNamespace(release=lambda: None)


class Steps(RuleBasedStateMachine):
    """The naive model: which steps have a graph, which have failed, and which are known to be compiled by now."""

    budget = Budget()

    def __init__(self) -> None:
        super().__init__()
        ticks = itertools.count()
        self.table = StepTable(self.budget, clock=lambda: float(next(ticks)))
        self.dispatcher = Dispatcher(self.table, SIMPLEST, PADDING)
        self.ready: set[StepKey] = set()
        self.failed: set[StepKey] = set()
        self.failed_in_turn: Counter[StepKey] = Counter()
        self.begun: set[StepKey] = set()
        self.compiled: set[StepKey] = set()
        self.table.when_dropped.append(self.ready.discard)

    # ---- what happens to steps

    @rule(keys=st.sets(st.sampled_from(KEYS), min_size=1))
    def can_be_launched(self, keys: set[StepKey]) -> None:
        for key in keys:
            self.table.compiled(key)
        self.compiled |= keys

    @precondition(lambda self: not self.begun)
    @rule(keys=st.sets(st.sampled_from(KEYS), max_size=3))
    def are_captured_at_once(self, keys: set[StepKey]) -> None:
        for key in sorted(keys - self.ready):
            self.failed.discard(key)
            with self.table.capturing(key):
                self.captured(key, self.table.add)

    @precondition(lambda self: len(self.ready | self.begun) < len(KEYS))
    @rule(data=st.data())
    def begins(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([key for key in KEYS if key not in self.ready | self.begun]))
        self.table.begin(key)
        self.begun.add(key)
        self.failed.discard(key)

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), end=st.sampled_from(["captured", "captured between steps", "failed", "given up"]))
    def ends(self, data: st.DataObject, end: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.begun)))
        self.begun.discard(key)
        if end == "failed":
            self.table.fail(key)
            self.failed_in_turn[key] += 1
            if self.failed_in_turn[key] >= ATTEMPTS:
                self.failed.add(key)
        elif end == "given up":
            self.table.give_up(key)
        else:
            self.captured(key, self.table.add if end == "captured" else self.table.try_to_add)

    def captured(self, key: StepKey, add: Callable[..., object]) -> None:
        self.ready.add(key)
        self.failed_in_turn[key] = 0
        self.compiled.discard(key)  # by the program as it was when the capture began
        add(key, graph(), Cost(1, 0, 0.1), "steps")

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def is_found_valid(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.ready)))
        self.table.entries[key].checked_at = self.table.model_checks
        self.compiled.add(key)

    @rule()
    def the_model_is_looked_at(self) -> None:
        self.table.model_checks += 1
        self.compiled.clear()

    @rule()
    def the_model_has_changed(self) -> None:
        self.table.forget("decode", "prefill")
        for known in (self.ready, self.failed, self.failed_in_turn, self.begun, self.compiled):
            known.clear()

    # ---- what runs

    def could_run_in(self, step: StepKey) -> list[StepKey]:
        """The ready steps that hold all rows and tokens of another, and take not much longer."""
        if step.phase == "decode":
            return [other for other in self.ready if other.phase == "decode" and holds(other, step, MOST * 2)]
        return [other for other in self.ready if other.phase == "prefill" and holds(other, step, PADDING)]

    @invariant()
    def any_step_may_be_wanted(self) -> None:
        before = {key: self.table.state(key) for key in KEYS}
        for step, exact in itertools.product(KEYS, (False, True)):
            self.check(step, exact, self.dispatcher.dispatch(step, exact))
        assert {key: self.table.state(key) for key in KEYS} == before, "to ask changes nothing"
        assert {key for key in KEYS if before[key] == "ready"} == self.ready

    def check(self, step: StepKey, exact: bool, dispatch: Dispatch) -> None:
        ran, how = dispatch
        if how == "run":
            assert ran in self.could_run_in(step), "only what is captured is replayed"
            assert ran == step or (not exact and step not in self.ready), "it is padded without need"
            assert ran == step or not [other for other in self.could_run_in(step) if other[1:3] < ran[1:3]]
            return
        assert ran == step
        assert step not in self.ready
        needs_compiling = step.phase == "decode" and step not in self.compiled
        assert (how == "compile") == needs_compiling, "nothing is launched that a call would wait for"
        if how != "compile":
            assert exact or not self.could_run_in(step), "it would not have to run kernel by kernel"
            most = self.budget.max_graphs
            needs_room = exact and most is not None and len(self.ready) >= most and step not in self.failed
            assert (how == "capture") == needs_room


def holds(other: StepKey, step: StepKey, padding: int) -> bool:
    same = other.schedule in (SIMPLEST, step.schedule)
    if step.phase == "decode":
        same = same and other.tokens // other.rows == step.tokens // step.rows
    return same and other.rows >= step.rows and 0 <= other.tokens - step.tokens <= padding


def machine(budget: Budget) -> Any:
    made = type("Bounded", (Steps,), {"budget": budget}).TestCase
    made.settings = settings(derandomize=True, deadline=None, max_examples=25, stateful_step_count=40)
    return made


TestUnbounded = machine(Budget())
TestAFew = machine(Budget(max_graphs=3))
TestSome = pytest.mark.whole(machine(Budget(max_graphs=6)))


@pytest.mark.parametrize("captures", [False, True])
def test_what_is_compiled_runs_where_nothing_is_captured(captures: bool) -> None:
    table = StepTable(captures=captures)
    dispatcher, step = Dispatcher(table), StepKey.decode(4)
    assert dispatcher.dispatch(step, exact=False) == Dispatch(step, "compile")
    table.compiled(step)
    assert dispatcher.dispatch(step, exact=False) == Dispatch(step, "launch" if captures else "run")
    table.model_checks += 1
    assert dispatcher.dispatch(step, exact=False) == Dispatch(step, "compile" if captures else "run")


@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("ready", [DECODES, DECODES[1::2], DECODES[::2], []])
def test_rows_that_are_left_go_on_in_a_step_that_nothing_has_to_be_prepared_for(
    ready: list[StepKey], captures: bool
) -> None:
    table = StepTable(captures=captures)
    for step in ready:
        table.compiled(step)
        if captures:
            table.begin(step)
            table.add(step, graph(), Cost(), "steps")
    most = MOST + 4  # the buckets of 16 and 20 rows are less than half apart
    config, dispatcher = SimpleNamespace(max_batch_size=most), Dispatcher(table)
    state = cast(Any, SimpleNamespace(step_table=table, config=config, device="cpu"))
    anything = cast(Any, MagicMock())
    steps = execution.Steps(state, anything, dispatcher, anything)
    for before, rows, exact in itertools.product(range(1, most + 1), range(1, most + 1), (False, True)):
        previous, smallest = steps.decode_of(before), steps.decode_of(rows)
        step = steps.decode_of(rows, previous, exact)
        assert step.rows >= rows
        if smallest >= previous:
            assert step == smallest
        elif exact and captures:
            few = max(2, smallest.rows)  # one row stays in the program of several
            assert step == (StepKey.decode(few) if 2 * smallest.rows <= previous.rows else previous)
        else:
            between = [other for other in ready if smallest <= other <= previous]
            assert step == (between[0] if between else smallest)


def test_a_key_says_how_many_tokens_a_row_has() -> None:
    assert [step.new_tokens_per_row for step in (*DECODES[:2], *OF_TWO_TOKENS[:2])] == [1, 1, 2, 2]
    assert len({*KEYS}) == len(KEYS)
    assert StepKey.decode(4) == StepKey("decode", 4, 4)
