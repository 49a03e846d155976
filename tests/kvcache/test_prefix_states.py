"""A prefix tree finds pages with the state after them, and gives states up when rows need their entries.

Pools, rows and tree run in random order against a naive memory: what a page or an entry holds are the tokens that have
led to it, and nothing once nobody owns it.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from compiled_llm.kvcache.errors import OutOfPagesError, OutOfStatesError
from compiled_llm.kvcache.pool import PagePool
from compiled_llm.kvcache.prefix_tree import PrefixMatch, PrefixTree
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.state_pool import RowStates, StatePool
from compiled_llm_ops.contracts import NO_ENTRY

pytestmark = pytest.mark.core

Tokens = tuple[int, ...]
Text = tuple[Hashable, Tokens]
"""A salt, and tokens under it."""

NOTHING: Text = ("poison", (-1,))

some_tokens = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=24).map(tuple)
salts = st.sampled_from([None, None, None, "a"])


def array(tokens: Tokens) -> NDArray[np.int64]:
    return np.array(tokens, dtype=np.int64)


class RowsWithStates(RuleBasedStateMachine):
    """Rows that compute prompts in chunks, decode, fork and end, and what their tree keeps."""

    @initialize(pages=st.integers(8, 40), size=st.integers(1, 3), entries=st.integers(3, 10))
    def start(self, pages: int, size: int, entries: int) -> None:
        self.size = size
        self.states = StatePool(entries)
        self.pool = PagePool(pages + 1, size, states=self.states)
        self.tree = PrefixTree(self.pool)
        self.texts: dict[Row, Text] = {}
        self.pages: list[Text] = [NOTHING] * (pages + 1)
        self.memory: list[Text] = [NOTHING] * entries
        self.used_at: dict[int, int] = {}  # of the entries in the tree
        self.clock = 0
        forget = self.tree.forget_state

        def forget_checked() -> int:
            alone = [entry for entry in self.tree._states.values() if self.owners(entry) == 0]
            forgotten = forget()
            assert forgotten == min(alone, key=self.used_at.__getitem__), "others were used before"
            return forgotten

        self.tree.forget_state = forget_checked  # type: ignore[method-assign]

    def owners(self, entry: int) -> int:
        return sum(entry in self.of(row).places for row in self.texts)

    @staticmethod
    def of(row: Row) -> RowStates:
        assert row.states is not None
        return row.states

    def use(self, entry: int) -> None:
        self.clock += 1
        self.used_at[entry] = self.clock

    def some_row(self, data: st.DataObject) -> Row:
        return data.draw(st.sampled_from(list(self.texts)))

    # ---- what a device does

    def run(self, row: Row, tokens: Tokens) -> bool:
        """Grow a row by a step's tokens; whether there was room."""
        salt, old = self.texts[row]
        try:
            row.grow(len(tokens))
        except OutOfPagesError:
            return False
        read, write = self.of(row).step
        assert self.memory[read] == (salt, old) if old else read == NO_ENTRY
        assert self.states._owners[write] == 1, "someone else reads what is written"
        assert write not in self.tree._states.values()
        self.memory[write] = self.texts[row] = (salt, old + tokens)
        for end in range(self.size, row.length + 1, self.size):
            if end > len(old):
                self.pages[row.pages[end // self.size - 1]] = (salt, (old + tokens)[:end])
        return True

    def end(self, row: Row) -> None:
        row.free()
        del self.texts[row]

    def expected(self, salt: Hashable, tokens: Tokens) -> int:
        """After how many of a prompt's tokens the longest state is that the tree has."""
        kept = {self.memory[entry] for entry in self.tree._states.values()}
        ends = range(0, len(tokens), self.size)
        return max(end for end in ends if not end or (salt, tokens[:end]) in kept)

    def match(self, salt: Hashable, tokens: Tokens) -> tuple[Row, PrefixMatch]:
        wanted = self.expected(salt, tokens)
        plenty = min(self.pool.available - len(tokens), self.states.available) > 3
        match = self.tree.match(array(tokens), salt)
        found = len(match.pages) * self.size
        assert found == wanted or (found < wanted and not plenty)
        assert (match.state == NO_ENTRY) == (found == 0)
        if found:
            assert self.memory[match.state] == (salt, tokens[:found])
            self.use(match.state)
        assert all(found < cut < len(tokens) and cut % self.size == 0 for cut in match.cuts)
        row = Row(self.pool, 0)
        self.texts[row] = (salt, ())
        try:
            row.begin_from(match.pages, match.state)
        except OutOfStatesError:
            self.tree.give_back(match)
        else:
            self.texts[row] = (salt, tokens[:found])
        return row, match

    # ---- in random order

    @rule(salt=salts, tokens=some_tokens, ends=st.booleans(), keeps=st.booleans())
    def compute_a_prompt(self, salt: Hashable, tokens: Tokens, ends: bool, keeps: bool) -> None:
        row, match = self.match(salt, tokens)
        try:
            row.reserve(len(tokens))
        except OutOfPagesError:
            self.end(row)
            return
        for cut in (*(match.cuts if row.length or not match.pages else ()), len(tokens)):
            assert self.run(row, tokens[row.length : cut]), "all was promised"
            if cut < len(tokens) or (keeps and cut % self.size == 0):
                self.keep(row)
        if ends:
            self.end(row)

    def keep(self, row: Row) -> None:
        salt, tokens = self.texts[row]
        try:
            state = row.lend_state()
        except OutOfStatesError:
            state = NO_ENTRY
        had = {self.memory[entry] for entry in self.tree._states.values()}
        self.tree.insert(array(tokens), row.pages, salt, state)
        now = [entry for entry in self.tree._states.values() if self.memory[entry] == (salt, tokens)]
        assert bool(now) == ((salt, tokens) in had or state != NO_ENTRY)
        if state != NO_ENTRY:
            self.use(now[0])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=some_tokens)
    def compute_what_begins_as_another(self, data: st.DataObject, more: Tokens) -> None:
        salt, tokens = self.texts[self.some_row(data)]
        kept = data.draw(st.integers(0, len(tokens)))
        self.compute_a_prompt(salt, tokens[:kept] + more, data.draw(st.booleans()), data.draw(st.booleans()))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), count=st.integers(1, 6))
    def decode(self, data: st.DataObject, count: int) -> None:
        row = self.some_row(data)
        for _ in range(count):
            if not self.run(row, (data.draw(st.sampled_from([0, 1])),)):
                return

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=some_tokens)
    def fail(self, data: st.DataObject, tokens: Tokens) -> None:
        row = self.some_row(data)
        mark, text = row.mark(), self.texts[row]
        if self.run(row, tokens):
            row.restore(mark)
            self.texts[row] = text

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def keep_pages(self, data: st.DataObject) -> None:
        row = self.some_row(data)
        salt, tokens = self.texts[row]
        self.tree.insert(array(tokens), row.pages, salt)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row = self.some_row(data)
        try:
            self.texts[row.fork()] = self.texts[row]
        except OutOfStatesError:
            return

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        self.some_row(data).settle()

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.end(self.some_row(data))

    @precondition(lambda self: len(self.tree._states) > 2)
    @rule()
    def clear(self) -> None:
        self.tree.clear()
        assert not self.tree._states

    # ---- what always holds

    @invariant()
    def accounts_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        own = {entry for row in self.texts for entry in self.of(row).places} - {NO_ENTRY}
        kept = list(self.tree._states.values())
        assert len(set(kept)) == len(kept)
        account = self.states.account()
        assert account == (self.states.total, len(own), len(self.states._free), len(set(kept) - own))
        assert account.used + account.free + account.cached == account.total
        assert self.states.available >= 0
        assert self.pool.available >= 0
        used = {page for row in self.texts for page in row.pages}
        assert self.pool.account().used == len(used)
        for entry in self.states._free:
            self.memory[entry] = NOTHING
        for page in self.pool._free:
            self.pages[page] = NOTHING

    @invariant()
    def all_find_their_own(self) -> None:
        if not hasattr(self, "pool"):
            return
        for row, (salt, tokens) in self.texts.items():
            assert row.length == len(tokens)
            assert row.entry == NO_ENTRY if not tokens else self.memory[row.entry] == (salt, tokens)
            ends = range(self.size, len(tokens) + 1, self.size)
            assert [self.pages[page] for page in row.pages[: len(ends)]] == [(salt, tokens[:end]) for end in ends]
        for node, entry in self.tree._states.items():
            assert self.memory[entry] == self.pages[self.tree._pages[node][0]], "a state of another page"

    def teardown(self) -> None:
        for row in list(self.texts):
            self.end(row)
        self.tree.clear()
        assert self.pool.account().free == self.pool.available == self.pool.total
        assert self.states.account().free == self.states.available == self.states.total


class TestRowsWithStates(RowsWithStates.TestCase):  # type: ignore[misc]
    settings = settings(derandomize=True, deadline=None, max_examples=80, stateful_step_count=40)


@pytest.mark.whole
class TestManyRowsWithStates(RowsWithStates.TestCase):  # type: ignore[misc]
    settings = settings(deadline=None, max_examples=400, stateful_step_count=100, database=None)


def test_states_that_cannot_be_kept_are_refused() -> None:
    states = StatePool(8)
    pool = PagePool(12, 2, states=states)
    tree, row, other = PrefixTree(pool), Row(pool, 0), Row(pool, 0)
    row.grow(4)
    other.grow(4)
    state = row.lend_state()
    with pytest.raises(ValueError, match="a state after 3 tokens; it has to be at the end of a page"):
        tree.insert(array((1, 2, 3)), row.pages, state=state)
    tree.insert(array((1, 2, 3, 4)), row.pages, state=state)
    with pytest.raises(ValueError, match=f"the state {state} belongs to no row, or is in the tree after other tokens"):
        tree.insert(array((5, 6, 7, 8)), other.pages, state=state)
    with pytest.raises(ValueError, match=r"another prefix tree holds states of this pool; clear\(\)"):
        PrefixTree(pool).insert(array((5, 6, 7, 8)), other.pages, state=other.entry)
    assert (len(tree), states.account().cached) == (2, 0)
    with pytest.raises(ValueError, match="there are no recurrent layers"):
        PrefixTree(PagePool(4, 2)).insert(array((5, 6)), [1], state=0)
    row.free()
    other.free()
    assert states.account() == (8, 0, 7, 1)


def test_a_prompt_is_cut_where_it_parts_and_where_it_ends() -> None:
    pool = PagePool(60, 2, states=StatePool(8))
    tree, row = PrefixTree(pool), Row(pool, 0)
    text = tuple(range(40))
    assert tree.match(array(text)) == ([], NO_ENTRY, (38,), None)
    assert tree.match(array(text[:8])).cuts == (), "less than four pages end before the last token"
    row.grow(20)
    tree.insert(array(text[:20]), row.pages)
    match = tree.match(array(text))
    assert match == ([], NO_ENTRY, (20, 38), row.pages[9])
    assert tree.parts(array(text)) == row.pages[9]
    assert tree.match(array(text[:26])).cuts == (20,), "the end is near"
    tree.insert(array(text[:20]), row.pages, state=row.lend_state())
    match = tree.match(array(text))
    assert match == (row.pages, row.entry, (38,), None)
    tree.give_back(match)
    assert tree.parts(array(text)) is None
    row.free()
    assert (pool.account().cached, pool.states and pool.states.account().cached) == (10, 1)


def test_a_match_takes_nothing_that_is_promised_to_others() -> None:
    states = StatePool(6)
    pool = PagePool(13, 2, states=states)
    tree, row, text = PrefixTree(pool), Row(pool, 0), tuple(range(9))
    row.grow(8)
    tree.insert(array(text[:8]), row.pages, state=row.lend_state())
    row.free()
    states.reserve(states.available)
    assert tree.match(array(text)).pages == []
    assert (pool.account(), states.account(), states.available) == ((12, 0, 8, 4), (6, 0, 5, 1), 0)
    states.give_back(reserved=6)
    pool.reserve(pool.available - 2)
    assert tree.match(array(text)).pages == [], "two of its pages are promised, and there is no state before them"
    assert (pool.account(), states.account(), pool.available) == ((12, 0, 8, 4), (6, 0, 5, 1), 2)
