"""A prefix tree finds pages with the state after them, and gives states up when rows need their entries.

Pools, rows and tree run in random order against a naive memory: what a page or an entry
holds are the tokens that have led to it, and nothing once nobody owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from compiled_llm.kinds.rows import NO_ENTRY
from compiled_llm.kvcache.errors import OutOfPagesError, OutOfStatesError
from compiled_llm.kvcache.pool import PagePool, StatePool
from compiled_llm.kvcache.prefix_tree import PrefixMatch, PrefixTree
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.state_pool import RowStates

pytestmark = pytest.mark.core

Tokens = tuple[int, ...]


class Text(NamedTuple):
    """Tokens under a salt."""

    salt: Hashable
    tokens: Tokens


NOTHING = Text("poison", (-1,))


def array(tokens: Tokens) -> NDArray[np.int64]:
    return np.array(tokens, dtype=np.int64)


class World:
    """Rows that compute prompts in chunks, decode, fork and end, and what their tree keeps."""

    def __init__(self, pages: int, size: int, entries: int) -> None:
        self.size = size
        self.states = StatePool(entries)
        self.pool = PagePool(pages + 1, size, states=self.states)
        self.tree = PrefixTree(self.pool)
        self.texts: dict[Row, Text] = {}
        self.pages: list[Text] = [NOTHING] * (pages + 1)
        self.memory: list[Text] = [NOTHING] * entries
        self.used_at: dict[int, int] = {}  # of the entries in the tree
        self.clock = 0
        self._poison_what_is_released()
        forget = self.tree.forget_state

        def forget_checked() -> int:
            alone = [entry for entry in self.tree._states.values() if self.owners(entry) == 0]
            forgotten = forget()
            assert forgotten == min(alone, key=self.used_at.__getitem__), "others were used before"
            return forgotten

        self.tree.forget_state = forget_checked  # type: ignore[method-assign]

    def _poison_what_is_released(self) -> None:
        """What nobody owns any more holds nothing, from the moment on when that is so."""

        def poisoning(pool: Any, name: str, memory: list[Text]) -> None:
            release = getattr(pool, name)

            def released(what: Any) -> Any:
                numbers = [what] if isinstance(what, int) else list(what)
                result = release(what)
                for number in numbers:
                    if not pool._owners[number]:
                        memory[number] = NOTHING
                return result

            setattr(pool, name, released)

        for name in ("_disown", "uncache"):
            poisoning(self.pool, name, self.pages)
            poisoning(self.states, name, self.memory)

    def owners(self, entry: int) -> int:
        return sum(entry in self.of(row).places for row in self.texts)

    @staticmethod
    def of(row: Row) -> RowStates:
        assert row.states is not None
        return row.states

    def use(self, entry: int) -> None:
        self.clock += 1
        self.used_at[entry] = self.clock

    # ---- what a device does

    def run(self, row: Row, tokens: Tokens) -> bool:
        """Grow a row by a step's tokens; whether there was room."""
        (salt, old), before_it = self.texts[row], list(self.pages)
        try:
            copies = row.grow(len(tokens))
        except OutOfPagesError:
            return False
        for source, target in copies:  # queued before anything that writes, be the source free by now
            self.pages[target] = before_it[source]
        read, write = self.of(row).step
        assert self.memory[read] == Text(salt, old) if old else read == NO_ENTRY
        assert self.states._owners[write] == 1, "someone else reads what is written"
        assert write not in self.tree._states.values()
        self.memory[write] = self.texts[row] = Text(salt, old + tokens)
        for number in range(len(old) // self.size, -(-row.exact_length // self.size)):
            page, before = row.pages[number], old[: (number + 1) * self.size]
            assert self.pool._owners[page] == 1, "someone else reads the page that is written"
            if len(before) > number * self.size:
                assert self.pages[page].tokens[: len(before)] == before, "it goes on in another row's page"
            self.pages[page] = Text(salt, (old + tokens)[: (number + 1) * self.size])
        return True

    def end(self, row: Row) -> None:
        row.free()
        del self.texts[row]

    def expected(self, salt: Hashable, tokens: Tokens) -> int:
        """After how many of a prompt's tokens the longest state is that the tree has."""
        kept = {self.memory[entry] for entry in self.tree._states.values()}
        return max(end for end in range(len(tokens)) if not end or Text(salt, tokens[:end]) in kept)

    def match(self, salt: Hashable, tokens: Tokens) -> tuple[Row, PrefixMatch]:
        wanted = self.expected(salt, tokens)
        plenty = self.pool.available > len(tokens) + 1 and self.states.available > 3
        assert self.tree.known(array(tokens[:-1]), salt) == wanted
        match = self.tree.match(array(tokens), salt)
        found = match.tokens
        assert found == wanted or (found < wanted and not plenty)
        assert (match.state == NO_ENTRY) == (found == 0)
        assert len(match.pages) == -(-found // self.size)
        if found:
            assert self.memory[match.state] == Text(salt, tokens[:found])
            self.use(match.state)
        assert all(found < cut < len(tokens) and cut % self.size == 0 for cut in match.checkpoints)
        row = Row(self.pool, 0)
        self.texts[row] = Text(salt, ())
        try:
            row.begin_from(match.pages, match.state, match.tokens)
        except OutOfPagesError:
            self.tree.give_back(match)
        else:
            self.texts[row] = Text(salt, tokens[:found])
        return row, match

    # ---- in random order

    def some_row(self, random: Random) -> Row | None:
        return random.choice(list(self.texts)) if self.texts else None

    @staticmethod
    def some_tokens(random: Random, most: int = 24) -> Tokens:
        return tuple(random.choices([0, 0, 0, 1], k=random.randint(1, most)))

    def compute_a_prompt(self, random: Random) -> None:
        salt, tokens = random.choice([None, None, None, "a"]), self.some_tokens(random)
        self._compute(random, salt, tokens)

    def _compute(self, random: Random, salt: Hashable, tokens: Tokens) -> None:
        row, match = self.match(salt, tokens)
        try:
            row.reserve(len(tokens))
        except OutOfPagesError:
            self.end(row)
            return
        for cut in (*(match.checkpoints if row.exact_length or not match.pages else ()), len(tokens)):
            assert self.run(row, tokens[row.exact_length : cut]), "all was promised"
            if cut < len(tokens) or (random.random() < 0.5 and cut % self.size == 0):
                self.keep(row)
        if random.random() < 0.5:
            self.retire(random, row)

    def keep(self, row: Row) -> None:
        """Where a launch ends at a border of pages, and the row goes on."""
        salt, tokens = self.texts[row]
        try:
            state = row.lend_state()
        except OutOfStatesError:
            return
        self.tree.insert(array(tokens), row.pages, salt, state)
        self._has_kept(salt, tokens)

    def _has_kept(self, salt: Hashable, tokens: Tokens) -> None:
        (entry,) = [own for own in self.tree._states.values() if self.memory[own] == Text(salt, tokens)]
        self.use(entry)

    def retire(self, random: Random, row: Row | None = None) -> None:
        """The end of an answer: perhaps a step was launched beyond it."""
        row = self.some_row(random) if row is None else row
        if row is None:
            return
        salt, tokens = self.texts[row]
        shared = bool(row.pages) and any(row.pages[-1] in other.pages for other in self.texts if other is not row)
        kept = bool(row.pages) and row.pages[-1] in self.pool._in_tree  # what is known of a text never gets less
        if len(tokens) - 1 in self.of(row)._lengths and not (shared or kept):
            tokens = tokens[: len(tokens) - random.randint(0, 1)]
        hands_over = random.random() < 0.7 and not (shared and len(tokens) % self.size)
        state = self.of(row).hand_over(len(tokens)) if hands_over else NO_ENTRY
        self.tree.insert(array(tokens), row.pages, salt, state)
        if state != NO_ENTRY:
            self._has_kept(salt, tokens)
        self.end(row)

    def go_on_with_a_kept_text(self, random: Random) -> None:
        """With all of it, as a chat does, or with its beginning."""
        kept = [self.memory[entry] for entry in self.tree._states.values()]
        if kept:
            salt, tokens = random.choice(kept)
            begin = tokens if random.random() < 0.5 else tokens[: random.randint(0, len(tokens))]
            self._compute(random, salt, begin + self.some_tokens(random))

    def decode(self, random: Random) -> None:
        if (row := self.some_row(random)) is not None:
            for _ in range(random.randint(1, 6)):
                if not self.run(row, (random.choice([0, 1]),)):
                    return

    def fail(self, random: Random) -> None:
        if (row := self.some_row(random)) is not None:
            mark, text = row.mark(), self.texts[row]
            if self.run(row, self.some_tokens(random)):
                row.restore(mark)
                self.texts[row] = text

    def keep_pages(self, random: Random) -> None:
        if (row := self.some_row(random)) is not None:
            salt, tokens = self.texts[row]
            self.tree.insert(array(tokens), row.pages, salt)

    def fork(self, random: Random) -> None:
        if (row := self.some_row(random)) is not None and len(self.texts) < 12:
            try:
                self.texts[row.fork()] = self.texts[row]
            except OutOfStatesError:
                return

    def settle(self, random: Random) -> None:
        if (row := self.some_row(random)) is not None:
            row.release_unused()

    def free(self, random: Random) -> None:
        if (row := self.some_row(random)) is not None:
            self.end(row)

    def clear(self, random: Random) -> None:
        if len(self.tree._states) > 2 and random.random() < 0.2:
            self.tree.clear()
            assert not [*self.tree._states, *self.tree._ends, *self.tree._pages]

    # ---- what always holds

    def check(self) -> None:
        self._accounts_add_up()
        self._all_find_their_own()

    def _accounts_add_up(self) -> None:
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
        assert sum(account[1:]) == account.total
        assert all(self.memory[entry] == NOTHING for entry in self.states._free)
        assert all(self.pages[page] == NOTHING for page in self.pool._free)

    def _all_find_their_own(self) -> None:
        for row, (salt, tokens) in self.texts.items():
            assert row.exact_length == len(tokens)
            assert row.entry == NO_ENTRY if not tokens else self.memory[row.entry] == Text(salt, tokens)
            for number in range(-(-len(tokens) // self.size)):
                begun = tokens[: (number + 1) * self.size]
                found = self.pages[row.pages[number]]
                assert found._replace(tokens=found.tokens[: len(begun)]) == Text(salt, begun)
        ends = [node for nodes in self.tree._ends.values() for node in nodes]
        assert len(ends) == len(set(ends))
        assert set(ends) == {node for node in self.tree._pages if self.tree._is_end(node)} <= set(self.tree._states)
        for node, entry in self.tree._states.items():
            state, found = self.memory[entry], self.pages[self.tree._pages[node]]
            assert found._replace(tokens=found.tokens[: len(state.tokens)]) == state
            assert len(state.tokens) % self.size == len(node[1]) // 8 % self.size, "a state of another page"

    def close(self) -> None:
        for row in list(self.texts):
            self.end(row)
        self.tree.clear()
        assert self.pool.account().free == self.pool.available == self.pool.total
        assert self.states.account().free == self.states.available == self.states.total
        assert {*self.memory, *self.pages} == {NOTHING}


RULES: dict[str, Callable[[World, Random], None]] = {
    rule.__name__: rule
    for rule in (
        World.compute_a_prompt, World.go_on_with_a_kept_text, World.decode, World.retire, World.fail, World.keep_pages,
        World.fork, World.settle, World.free, World.clear,
    )
}  # fmt: skip


class RowsWithStates(RuleBasedStateMachine):
    """The world as Hypothesis runs it, which finds short cases."""

    @initialize(pages=st.integers(8, 40), size=st.integers(1, 4), entries=st.integers(3, 10))
    def start(self, pages: int, size: int, entries: int) -> None:
        self.world = World(pages, size, entries)

    @rule(name=st.sampled_from(list(RULES)), random=st.randoms(use_true_random=False))
    def act(self, name: str, random: Random) -> None:
        RULES[name](self.world, random)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


class TestRowsWithStates(RowsWithStates.TestCase):  # type: ignore[misc]
    settings = settings(derandomize=True, deadline=None, max_examples=20, stateful_step_count=30)


@pytest.mark.whole
class TestManyRowsWithStates(RowsWithStates.TestCase):  # type: ignore[misc]
    settings = settings(deadline=None, max_examples=400, stateful_step_count=100, database=None)


def live(steps: int, seed: int, pages: int = 40, size: int = 3, entries: int = 10) -> World:
    """Run a world for long; its account is zero in the end."""
    random, world = Random(f"states {seed}"), World(pages, size, entries)
    for _ in range(steps):
        random.choice(list(RULES.values()))(world, random)
        world.check()
    world.close()
    return world


@pytest.mark.parametrize(("pages", "size", "entries"), [(40, 3, 10), (16, 1, 4), (200, 4, 30), (12, 5, 40)])
@pytest.mark.parametrize("steps", [1000, pytest.param(10_000, marks=pytest.mark.whole)])
def test_a_long_life_leaves_nothing(steps: int, pages: int, size: int, entries: int, seed: int) -> None:
    live(steps, seed, pages, size, entries)


def swapped(patch: pytest.MonkeyPatch) -> None:
    grow = RowStates.grow

    def grown(self: RowStates, length: int, tokens: int) -> tuple[int, int]:
        grow(self, length, tokens)
        self.step = self.step[::-1]
        return self.step

    patch.setattr(RowStates, "grow", grown)


def one_step_too_many(patch: pytest.MonkeyPatch) -> None:
    """The end of an answer keeps the state after the step that was launched beyond it."""
    hand_over = RowStates.hand_over
    patch.setattr(RowStates, "hand_over", lambda self, length: hand_over(self, max(self._lengths)) if length else -1)


def of_the_next_page(patch: pytest.MonkeyPatch) -> None:
    keep = PrefixTree._keep_state

    def for_another(tree: PrefixTree, node: Any, state: int) -> None:
        below = [other for other in tree._pages if other[0] == tree._pages[node] and other not in tree._states]
        keep(tree, (below or [node])[0], state)

    patch.setattr(PrefixTree, "_keep_state", for_another)


def written_in_place(patch: pytest.MonkeyPatch) -> None:
    """A page that is full in part is not copied."""
    patch.setattr(Row, "_writes_into_shared", lambda self, length: False)


def no_copy_promised(patch: pytest.MonkeyPatch) -> None:
    """A row that begins in the middle of a page lacks one later."""
    begin = Row.begin_from

    def begun(self: Row, *args: Any) -> None:
        begin(self, *args)
        self._give_copy_back()

    patch.setattr(Row, "begin_from", begun)


def left_without_its_state(patch: pytest.MonkeyPatch) -> None:
    """An end within a page stays in the tree, though its state is gone."""
    patch.setattr(PagePool, "uncache", lambda self, pages: None)


def released_while_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StatePool, "share", lambda self, entry: None)


FAULTS = (
    swapped, one_step_too_many, of_the_next_page, written_in_place, no_copy_promised, left_without_its_state,
    released_while_shared,
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises((AssertionError, ValueError, LookupError, StopIteration)):
            [live(1000, seed + number, pages=14) for number in range(8)]
    live(100, seed, pages=14)


def test_states_that_cannot_be_kept_are_refused() -> None:
    states = StatePool(8)
    pool = PagePool(12, 2, states=states)
    tree, row, other = PrefixTree(pool), Row(pool, 0), Row(pool, 0)
    row.grow(4)
    other.grow(4)
    state = row.lend_state()
    with pytest.raises(ValueError, match="insert: a state after no tokens"):
        tree.insert(array(()), row.pages, state=state)
    with pytest.raises(ValueError, match="insert: 5 tokens take 3 pages; got 2"):
        tree.insert(array((1, 2, 3, 4, 5)), row.pages, state=state)
    tree.insert(array((1, 2, 3, 4)), row.pages, state=state)
    with pytest.raises(ValueError, match=f"the state {state} belongs to no row, or is in the tree after other tokens"):
        tree.insert(array((5, 6, 7, 8)), other.pages, state=state)
    with pytest.raises(ValueError, match=r"another prefix tree holds states of this pool; clear\(\)"):
        PrefixTree(pool).insert(array((5, 6, 7, 8)), other.pages, state=other.entry)
    assert (len(tree), states.account().cached) == (2, 0)
    with pytest.raises(ValueError, match="a state is given, and rows have none"):
        PrefixTree(PagePool(4, 2)).insert(array((5, 6)), [1], state=0)
    row.free()
    other.free()
    assert states.account() == (8, 0, 7, 1)


def test_a_prompt_is_cut_where_it_parts_and_where_it_ends() -> None:
    pool = PagePool(60, 2, states=StatePool(8))
    tree, row = PrefixTree(pool), Row(pool, 0)
    text = tuple(range(40))
    assert tree.match(array(text)) == ([], NO_ENTRY, (38,), 0)
    assert tree.match(array(text[:8])).checkpoints == (), "less than four pages end before the last token"
    row.grow(20)
    tree.insert(array(text[:20]), row.pages)
    assert tree.match(array(text)) == ([], NO_ENTRY, (20, 38), 0)
    assert tree.match(array(text[:26])).checkpoints == (20,), "the end is near"
    assert tree.known(array(text)) == 0
    tree.insert(array(text[:20]), row.pages, state=row.lend_state())
    match = tree.match(array(text))
    assert match == (row.pages, row.entry, (38,), 20)
    tree.give_back(match)
    assert tree.known(array(text)) == tree.known(array(text[:20])) == 20
    assert tree.known(array(text[:19])) == 0
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


def test_an_end_within_a_page_is_found_and_goes_with_its_state() -> None:
    states = StatePool(8)
    pool = PagePool(60, 4, states=states)
    tree, row = PrefixTree(pool), Row(pool, 0)
    text = tuple(range(40))
    row.grow(18)
    row.grow(1)
    of_row = row.states
    assert of_row is not None
    state = of_row.hand_over(18)
    assert of_row.hand_over(17) == of_row.hand_over(0) == NO_ENTRY
    tree.insert(array(text[:18]), row.pages, state=state)
    pages = row.pages
    row.free()
    assert (pool.account().cached, states.account().cached) == (5, 1)
    assert tree.match(array(text[:18])).tokens == 0, "a token is left to compute"
    assert tree.match(array((*text[:17], 99, 18, 19))).tokens == 0
    match = tree.match(array(text))
    assert match == (pages, state, (36,), 18)
    other = Row(pool, 0)
    pool.reserve(pool.available)
    with pytest.raises(OutOfPagesError):
        other.begin_from(match.pages, match.state, match.tokens)
    pool.give_back((), 54)
    other.begin_from(match.pages, match.state, match.tokens)
    ((source, target),) = other.grow(1)
    assert (source, other.pages) == (pages[4], [*pages[:4], target])
    other.free()
    for _ in range(8):
        states.reserve(1)
        states.take_reserved(1)
    assert (len(tree), pool.account().cached, tree.match(array(text)).pages) == (4, 4, [])
