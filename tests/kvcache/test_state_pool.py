"""Entries of states: each row finds its own state, nothing that another owner reads is written, and accounts add up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from compiled_llm.kinds.rows import NO_ENTRY
from compiled_llm.kvcache.errors import OutOfStatesError
from compiled_llm.kvcache.pool import StateAccount, StatePool
from compiled_llm.kvcache.state_pool import RowStates

pytestmark = pytest.mark.core


def running(pool: StatePool) -> RowStates:
    states = RowStates(pool)
    states.reserve()
    return states


def test_a_step_of_one_token_reads_one_place_and_writes_the_other() -> None:
    pool = StatePool(4)
    row = running(pool)
    read, first = row.grow(0, 5)
    assert read == NO_ENTRY
    assert row.places[1] == first
    read, second = row.grow(5, 1)
    assert (read, row.places) == (first, (second, first))
    period = row.period
    for length in range(6, 20):
        read, written = row.grow(length, 1)
        assert (written, read) == (row.places[(length + 1) % 2], row.places[length % 2])
    assert row.period is period, "steps of one token change nothing"
    row.has_grown(30)
    assert (row.of(30), row.of(29)) == row.places
    row.free()
    row.free()
    assert (pool.account(), pool.available) == (StateAccount(4, 0, 4, 0), 4)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_a_step_that_runs_again_begins_with_the_state_before_it(tokens: int) -> None:
    row = running(StatePool(2))
    _, before = row.grow(0, 7)
    read, written = row.grow(7, tokens)
    assert (read, written != before) == (before, True)
    assert row.places[(7 + tokens) % 2] == written
    row.shrink(7)
    assert row.grow(7, tokens) == (read, written)
    row.shrink(7)
    assert row.of(7) == before
    with pytest.raises(ValueError, match=r"state after 6 tokens is needed; the row has those after 7$"):
        row.shrink(6)
    with pytest.raises(ValueError, match="state after 9 tokens"):
        row.grow(9, 1)
    assert row.of(7) == before
    row.shrink(0)
    assert row.of(0) == NO_ENTRY


def test_a_row_that_is_admitted_never_runs_out() -> None:
    pool = StatePool(5)
    rows = [running(pool), running(pool)]
    with pytest.raises(OutOfStatesError, match="2 states of rows are needed and 1 of 5 are available"):
        running(pool)
    for row in rows:
        row.grow(0, 3)
    with pytest.raises(OutOfStatesError):
        rows[0].fork(3)
    assert pool.available == 1
    lent = rows[0].lend(3)
    with pytest.raises(OutOfStatesError):
        rows[1].lend(3)
    for length in range(3, 9):
        assert lent not in (written := [row.grow(length, 1)[1] for row in rows]), written
    pool.give_back([lent])
    rows[0].release_unused(9)
    assert pool.account().used == 1 + 2
    for row in rows:
        row.free()
    assert (pool.account().used, pool.available) == (0, 5)


def test_what_is_lent_stays_and_is_gone_back_to() -> None:
    pool = StatePool(6)
    row = running(pool)
    row.grow(0, 4)
    assert not row.alternates, "it has one entry"
    lent = row.lend(4)
    row.grow(4, 1)
    assert not row.alternates, "a step that is repeated would write what is lent"
    for length in range(5, 9):
        assert lent not in row.grow(length, 1)[1:]
        assert row.alternates
    row.go_back(lent, 4)
    assert (row.of(4), pool.account().used, pool.available) == (lent, 1, 5)
    assert row.grow(4, 2)[0] == lent
    row.give_back(row.lend(6))
    row.free()
    assert (pool.account().used, pool.available) == (0, 6)


ENTRIES = 12


class States(RuleBasedStateMachine):
    """Rows beside a naive memory: what each entry holds are the tokens that have led to it."""

    rows, snapshots = Bundle("rows"), Bundle("snapshots")

    @initialize()
    def begin(self) -> None:
        self.pool = StatePool(ENTRIES)
        self.memory: dict[int, tuple[int, ...]] = {}
        self.tokens: dict[RowStates, tuple[int, ...]] = {}
        self.kept: list[tuple[int, tuple[int, ...]]] = []
        self.next_token = 0

    def _owned(self) -> list[int]:
        own = [entry for row in self.tokens for entry in set(row.places) - {NO_ENTRY}]
        return own + [entry for entry, _ in self.kept]

    @rule(target=rows)
    def new_row(self) -> Any:
        try:
            row = running(self.pool)
        except OutOfStatesError:
            row = None
        else:
            self.tokens[row] = ()
        return row

    @rule(row=rows, count=st.integers(1, 4), again=st.booleans())
    def step(self, row: RowStates | None, count: int, again: bool) -> None:
        if row not in self.tokens:
            return
        before = self.tokens[row]
        new = tuple(range(self.next_token, self.next_token + count))
        self.next_token += count
        for _ in range(1 + again):
            try:
                read, write = row.grow(len(before), count)
            except OutOfStatesError:
                assert row.of(len(before)) == NO_ENTRY or self.memory[row.of(len(before))] == before
                return
            assert (() if read == NO_ENTRY else self.memory[read]) == before
            assert self._owned().count(write) == 1, "someone else reads what is written"
            if count == 1:
                assert row.places[(len(before) + 1) % 2] == write
                assert read == NO_ENTRY or row.places[len(before) % 2] == read
            self.memory[write] = before + new
            self.tokens[row] = before + new
            if again:
                row.shrink(len(before))
        if again:
            self.tokens[row] = before

    @rule(target=rows, row=rows)
    def fork(self, row: RowStates | None) -> Any:
        if row not in self.tokens:
            return None
        tokens = self.tokens[row]
        try:
            forked = row.fork(len(tokens))
        except OutOfStatesError:
            return None
        self.tokens[forked] = tokens
        return forked

    @rule(target=snapshots, row=rows)
    def snapshot(self, row: RowStates | None) -> Any:
        if row not in self.tokens or not self.tokens[row]:
            return None
        try:
            kept = row.lend(len(self.tokens[row])), self.tokens[row]
        except OutOfStatesError:
            return None
        self.kept.append(kept)
        return kept

    @rule(target=rows, kept=snapshots)
    def begin_with(self, kept: Any) -> Any:
        if kept not in self.kept:
            return None
        try:
            row = running(self.pool)
        except OutOfStatesError:
            return None
        try:
            row.begin_with(kept[0], len(kept[1]))
        except OutOfStatesError:
            row.free()
            return None
        self.tokens[row] = kept[1]
        return row

    @rule(kept=consumes(snapshots))
    def forget_snapshot(self, kept: Any) -> None:
        if kept in self.kept:
            self.kept.remove(kept)
            self.pool.give_back([kept[0]])

    @rule(row=rows)
    def settle(self, row: RowStates | None) -> None:
        if row in self.tokens:
            row.release_unused(len(self.tokens[row]))

    @rule(row=consumes(rows))
    def free(self, row: RowStates | None) -> None:
        if row in self.tokens:
            row.free()
            del self.tokens[row]

    @invariant()
    def all_states_are_there(self) -> None:
        for row, tokens in self.tokens.items():
            entry = row.of(len(tokens))
            assert (() if entry == NO_ENTRY else self.memory[entry]) == tokens
        for entry, tokens in self.kept:
            assert self.memory[entry] == tokens
        assert self.pool.account().used == len(set(self._owned()))
        assert self.pool.available >= 0

    def teardown(self) -> None:
        for row in self.tokens:
            row.free()
        for entry, _ in self.kept:
            self.pool.give_back([entry])
        assert (self.pool.account().used, self.pool.available) == (0, ENTRIES)


TestStates = States.TestCase
