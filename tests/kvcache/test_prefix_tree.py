"""Pages never get lost, and a promise is kept; a prefix tree finds pages that hold the beginning of a prompt.

The tree gives them up when rows need them. Pool, rows and tree run in random order against a naive model of which page
has which owners and contents.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from compiled_llm.kvcache.errors import OutOfPagesError
from compiled_llm.kvcache.pool import NULL_PAGE, PagePool, Promise
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.kvcache.row import Row

pytestmark = pytest.mark.core

Tokens = tuple[int, ...]
Prefix = tuple[Hashable, Tokens]
"""A salt, and the tokens of whole pages under it."""
Written = tuple[Hashable, Tokens]
"""What a slot of a page holds: its token, which depends on all tokens before it."""

POISON: Written = ("poison", ())

some_tokens = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=9).map(tuple)
salts = st.sampled_from([None, None, None, "a", 0, 1, (None,)])


class NaivePool:
    """Owners of pages as sets, the tree as a dict of prefixes."""

    def __init__(self, pages: int) -> None:
        self.owners: dict[int, set[object]] = {page: set() for page in range(1, pages + 1)}
        self.stored: dict[Prefix, int] = {}
        self.used_at: dict[Prefix, int] = {}
        self.clock = self.evicted = self.peak_used = 0

    def free(self) -> set[int]:
        return {page for page, owners in self.owners.items() if not owners}

    def cached(self) -> set[int]:
        return {page for page, owners in self.owners.items() if owners == {"tree"}}

    def note_peak(self) -> None:
        self.peak_used = max(self.peak_used, len(self.owners) - len(self.free()) - len(self.cached()))

    def use(self, prefixes: Sequence[Prefix]) -> None:
        self.clock += 1
        self.used_at.update(dict.fromkeys(prefixes, self.clock))

    def leaves(self) -> list[Prefix]:
        def is_below(prefix: Prefix, other: Prefix) -> bool:
            return prefix[0] == other[0] and len(prefix[1]) > len(other[1]) and prefix[1][: len(other[1])] == other[1]

        return [leaf for leaf in self.stored if not any(is_below(prefix, leaf) for prefix in self.stored)]

    def oldest_first(self) -> list[int]:
        order = sorted(self.stored, key=lambda prefix: (self.used_at[prefix], -len(prefix[1])))
        return [self.stored[prefix] for prefix in order]

    def forget(self, prefix: Prefix) -> None:
        self.owners[self.stored.pop(prefix)].remove("tree")
        del self.used_at[prefix]

    def make_room(self, pages: int) -> None:
        """Evict leaf by leaf, and no more than it takes."""
        while len(self.free()) < pages:
            self.keep_shared()
            self.evicted += 1
            self.forget(self.oldest_leaf())

    def oldest_leaf(self) -> Prefix:
        return min(self.leaves(), key=self.used_at.__getitem__)

    def keep_shared(self) -> None:
        """Count those at the end of which is a page of several rows as used, but all at most once."""
        moved = 0
        while moved < len(self.stored) and self.rows_with(self.stored[leaf := self.oldest_leaf()]) > 1:
            above = [other for other in self.stored if other[0] == leaf[0] and leaf[1][: len(other[1])] == other[1]]
            self.use(above)
            moved += len(above)

    def take(self, row: Row, pages: Sequence[int]) -> None:
        assert self.free().issuperset(pages)
        for page in pages:
            self.owners[page] = {row}
        self.note_peak()

    def give_back(self, row: Row, pages: Sequence[int]) -> None:
        for page in pages:
            self.owners[page].remove(row)

    def rows_with(self, page: int) -> int:
        return len(self.owners[page] - {"tree"})


class Requests(RuleBasedStateMachine):
    """Rows with their texts, of which some are kept in the tree, and what a device knows and stores of them."""

    @initialize(pages=st.integers(3, 20), size=st.integers(1, 5))
    def start(self, pages: int, size: int) -> None:
        self.pool, self.size = PagePool(pages + 1, size), size
        self.tree, self.naive = PrefixTree(self.pool), NaivePool(pages)
        self.texts: dict[Row, Written] = {}
        self.listed: dict[Row, list[int]] = {}  # the page numbers that a device knows of each
        self.memory = [[POISON] * size for _ in range(pages + 1)]

    # ---- what a row does, in both

    def prefixes(self, salt: Hashable, tokens: Tokens) -> list[Prefix]:
        return [(salt, tokens[:end]) for end in range(self.size, len(tokens) + 1, self.size)]

    def contents(self, text: Written, length: int) -> list[Written]:
        return [(text[0], text[1][: token + 1]) for token in range(length)]

    def needed(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    def promised(self) -> int:
        return sum(row.limit // self.size - len(row.pages + row.ahead) for row in self.texts)

    def snapshot(self) -> object:
        rows = [
            (row.exact_length, row.exact_position, row.limit, tuple(row.pages), tuple(row.ahead)) for row in self.texts
        ]
        return self.pool.account(), self.pool.available, rows

    def copies(self, row: Row) -> bool:
        return row.exact_length % self.size > 0 and len(self.naive.owners[row.pages[-1]]) > 1

    def enter(self, row: Row, pages: Sequence[int]) -> None:
        """Take those pages that the row has not listed ahead."""
        new = [page for page in pages if row not in self.naive.owners[page]]
        self.naive.make_room(len(new))
        self.naive.take(row, new)
        for page in new:
            self.memory[page] = [POISON] * self.size

    def write(self, row: Row, tokens: Tokens) -> bool:
        """Grow a row and write into its pages as a device would; return whether there were pages for it."""
        before, ahead, copies = list(row.pages), list(row.ahead), bool(tokens) and self.copies(row)
        length, limit, available, state = (
            row.exact_length + len(tokens),
            row.limit,
            self.pool.available,
            self.snapshot(),
        )
        missing = max(0, self.needed(length) - limit // self.size) + copies
        if len(row.pages) == self.needed(row.exact_length):  # not between begin_as and the first tokens
            assert row.missing(length) == missing
        if missing > available:
            said = f"^{missing} pages are needed and {available} of {self.pool.total} are available$"
            with pytest.raises(OutOfPagesError, match=said):
                row.grow(len(tokens))
            assert self.snapshot() == state
            return False
        copy = next(iter(row.grow(len(tokens))), None)
        assert (copy is not None) == copies
        assert (row.exact_length, row.limit) == (length, max(limit, self.needed(length) * self.size))
        cached = copy is not None and self.naive.owners[copy.source] == {row, "tree"}  # which the row gives back
        assert self.pool.available == available - missing + cached
        if copy is not None:
            self.enter(row, [copy.target])
            self.naive.give_back(row, [copy.source])
            self.memory[copy.target] = list(self.memory[copy.source])
            before[-1] = copy.target
        assert row.pages[: len(before)] == before
        self.enter(row, row.pages)
        assert row.ahead == [page for page in ahead if page not in row.pages]
        salt, old = self.texts[row]
        for token, written in enumerate(self.contents((salt, old + tokens), row.exact_length)):
            if token >= len(old):
                self.memory[row.pages[token // self.size]][token % self.size] = written
        self.texts[row] = (salt, old + tokens)
        return True

    def match(self, salt: Hashable, tokens: Tokens) -> Row:
        """Begin a row with what the tree finds, which is what the naive one finds."""
        expected: list[int] = []
        spare, cached = self.pool.available, self.naive.cached()
        prefixes = self.prefixes(salt, tokens[:-1])
        for prefix in prefixes:
            page = self.naive.stored.get(prefix)
            if page is None or (page in cached and not spare):
                break
            spare -= page in cached
            expected.append(page)
        pages = self.tree.match(np.array(tokens, dtype=np.int64), salt).pages
        assert pages == expected
        row = Row(self.pool, 0)
        row.begin_from(pages)
        assert row.exact_length == row.exact_position == len(pages) * self.size <= max(0, len(tokens) - 1)
        self.naive.use(prefixes[: len(pages)])
        for page in pages:
            self.naive.owners[page].add(row)
        self.naive.note_peak()
        self.texts[row] = (salt, tokens[: row.exact_length])
        return row

    def store(self, row: Row, length: int) -> None:
        salt, tokens = self.texts[row]
        self.tree.insert(np.array(tokens[:length], dtype=np.int64), row.pages, salt)
        prefixes = self.prefixes(salt, tokens[:length])
        for prefix, page in zip(prefixes, row.pages, strict=False):
            if prefix not in self.naive.stored:
                self.naive.stored[prefix] = page
                self.naive.owners[page].add("tree")
        self.naive.use(prefixes)

    def end(self, row: Row) -> None:
        self.give_all_back(row)
        del self.texts[row]

    def give_all_back(self, row: Row) -> None:
        self.naive.give_back(row, row.pages + row.ahead)
        row.free()
        after = self.snapshot()
        assert (row.exact_length, row.exact_position, row.pages, row.ahead, row.limit) == (0, 0, [], [], 0)
        row.free()
        assert self.snapshot() == after
        self.texts[row] = (self.texts[row][0], ())
        self.listed.pop(row, None)

    def some_row(self, data: st.DataObject) -> Row:
        return data.draw(st.sampled_from(list(self.texts)))

    # ---- in random order

    @rule(salt=salts, tokens=some_tokens, more=st.integers(0, 10))
    def admit(self, salt: Hashable, tokens: Tokens, more: int) -> None:
        row = self.match(salt, tokens)
        try:
            row.reserve(len(tokens) + more)
        except OutOfPagesError:
            self.end(row)
        else:
            self.write(row, tokens[row.exact_length :])
            assert self.texts[row] == (salt, tokens)

    @rule(tokens=st.integers(0, 40))
    def admit_with_room_for(self, tokens: int) -> None:
        before, fits = self.snapshot(), self.needed(tokens) <= self.pool.available
        with nullcontext() if fits else pytest.raises(OutOfPagesError):
            row = Row(self.pool, tokens)
        if not fits:
            assert self.snapshot() == before
            return
        assert (row.exact_length, row.pages, row.limit) == (0, [], self.needed(tokens) * self.size)
        self.texts[row] = (None, ())

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def admit_what_begins_as_another(self, data: st.DataObject) -> None:
        salt, tokens = self.texts[self.some_row(data)]
        self.admit(salt, tokens + data.draw(some_tokens), data.draw(st.integers(0, 3)))

    @precondition(lambda self: self.texts and self.naive.cached())
    @rule(data=st.data(), left=st.integers(0, 2))
    def match_when_nearly_all_is_promised(self, data: st.DataObject, left: int) -> None:
        row = self.some_row(data)
        row.reserve(row.limit + max(0, self.pool.available - left) * self.size)
        salt, tokens = data.draw(st.sampled_from(list(self.naive.stored)))
        self.end(self.match(salt, (*tokens, 0)))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=some_tokens)
    def write_more(self, data: st.DataObject, tokens: Tokens) -> None:
        self.write(self.some_row(data), tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), whole=st.booleans(), ends=st.booleans())
    def insert(self, data: st.DataObject, whole: bool, ends: bool) -> None:
        row = self.some_row(data)
        self.store(row, row.exact_length if whole else data.draw(st.integers(0, row.exact_length)))
        if ends:
            self.end(row)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=some_tokens)
    def insert_go_back_and_write_on(self, data: st.DataObject, tokens: Tokens) -> None:
        """The page that the row goes back into is the tree's by now."""
        row = self.some_row(data)
        self.store(row, row.exact_length)
        self.go_back(row, data)
        self.write(row, tokens)

    @precondition(lambda self: any(row.limit and not row.exact_length for row in self.texts))
    @rule(data=st.data(), fails=st.booleans())
    def begin_as_another(self, data: st.DataObject, fails: bool) -> None:
        leader = data.draw(st.sampled_from([row for row in self.texts if row.limit and not row.exact_length]))
        tokens = data.draw(st.lists(st.sampled_from([0, 0, 1]), min_size=1, max_size=min(leader.limit, 12)).map(tuple))
        row, salt = Row(self.pool, 0), self.texts[leader][0]
        shared = row.begin_as(leader, len(tokens))
        assert len(tokens) - self.size <= shared < len(tokens)
        assert self.needed(len(tokens)) - shared // self.size == row.missing(len(tokens))
        self.enter(leader, leader.pages)
        for page in row.pages:
            self.naive.owners[page].add(row)
        self.texts[row] = (salt, tokens[:shared])
        if not fails and row.missing(len(tokens)) <= self.pool.available:
            self.write(leader, tokens)
            self.write(row, tokens[shared:])
            return
        marks = leader.mark(), row.mark()
        leader.grow(len(tokens))
        self.enter(leader, leader.pages)
        for own in (leader, row):
            self.naive.give_back(own, own.pages)
            self.texts[own] = (salt, ())
        leader.restore(marks[0])
        row.restore(marks[1])
        for own in (leader, row) if data.draw(st.booleans()) else (row, leader):
            own.shrink(own.exact_length)
        row.exact_position = 0

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), promised=st.integers(0, 24))
    def grow_fork_and_free_under_a_promise(self, data: st.DataObject, promised: int) -> None:
        promise, before = Promise(self.pool), self.pool.available
        if promised > before:
            with pytest.raises(OutOfPagesError), promise.reserved(promised):
                pass
            assert self.pool.available == before
            return
        with promise.reserved(promised):
            for _ in range(data.draw(st.integers(1, 4))):
                row, available, left = self.some_row(data), self.pool.available, promise._pages or 0
                tokens = data.draw(st.just(()) | some_tokens)
                more = row.missing(row.exact_length + len(tokens))
                with promise.drawn_on():
                    wrote = self.write(row, tokens)
                available -= max(0, more - left) if wrote else 0
                assert self.pool.available == available
                with promise.drawn_on():
                    row.fork().free()
                    if data.draw(st.booleans()):
                        self.give_all_back(row)
                assert self.pool.available == available

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), ahead=st.integers(0, 4))
    def list_pages(self, data: st.DataObject, ahead: int) -> None:
        """As far as pages are promised, the device knows some before the row enters them; no other has fewer for it."""
        row = self.some_row(data)
        available, limit, had = self.pool.available, row.limit, len(row.ahead)
        first, new = row.list_pages(ahead)
        self.enter(row, row.ahead)
        self.listed[row] = self.listed.get(row, [])[:first] + new
        assert self.listed[row] == row.pages + row.ahead
        assert len(row.ahead) == max(had, min(ahead, limit // self.size - len(row.pages)))
        assert (self.pool.available, row.limit) == (available, limit)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row, before = self.some_row(data), self.snapshot()
        fork = row.fork()
        assert self.snapshot() == before
        assert (fork.exact_length, fork.exact_position, fork.pages, fork.ahead) == (
            row.exact_length,
            row.exact_position,
            row.pages,
            [],
        )
        self.texts[fork] = self.texts[row]
        for page in fork.pages:
            self.naive.owners[page].add(fork)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        self.go_back(self.some_row(data), data)

    def go_back(self, row: Row, data: st.DataObject) -> None:
        kept, more = data.draw(st.integers(0, row.exact_length)), data.draw(st.integers(0, 20))
        available, limit = self.pool.available, row.limit
        missing = row.missing(kept + more, kept)
        staying, dropped = row.pages[: self.needed(kept)], row.pages[self.needed(kept) :]
        row.exact_position = row.exact_length + 7
        if data.draw(st.booleans()):
            row.shrink(row.exact_length - kept)
        else:
            for _ in range(2):  # the second time there is nothing to do
                row.rewind(kept)
                assert row.exact_position == kept + 7
        row.exact_position = kept
        self.naive.give_back(row, dropped)
        others = sum(self.naive.rows_with(page) > 0 for page in dropped)
        assert (row.exact_length, row.pages) == (kept, staying)
        assert (row.limit, self.pool.available) == (limit - others * self.size, available)
        assert row.missing(kept + more) == missing
        self.texts[row] = (self.texts[row][0], self.texts[row][1][:kept])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=some_tokens)
    def undo(self, data: st.DataObject, tokens: Tokens) -> None:
        row = self.some_row(data)
        mark, text, before = row.mark(), self.texts[row], len(row.pages)
        limit, copies, available = row.limit, self.copies(row), self.pool.available
        if not self.write(row, tokens):
            return
        self.naive.give_back(row, row.pages[before:])
        row.restore(mark)
        self.texts[row] = text
        assert row.limit == limit
        assert available - copies <= self.pool.available <= available  # a page that was copied stays copied

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.integers(0, 60))
    def promise(self, data: st.DataObject, tokens: int) -> None:
        row, before = self.some_row(data), self.snapshot()
        account, limit = self.pool.account(), max(row.limit, self.needed(tokens) * self.size)
        if (limit - row.limit) // self.size > self.pool.available:
            with pytest.raises(OutOfPagesError):
                row.reserve(tokens)
            assert self.snapshot() == before
            return
        for _ in range(2):  # the second time there is nothing to do
            row.reserve(tokens)
            assert (row.limit, self.pool.account()) == (limit, account)  # nothing is evicted before it is taken

    @precondition(lambda self: len(self.texts) > 2)
    @rule(data=st.data(), inserts=st.booleans())
    def end_some(self, data: st.DataObject, inserts: bool) -> None:
        for row in data.draw(st.lists(st.sampled_from(list(self.texts)), unique=True)):
            if inserts:
                self.store(row, row.exact_length)
            self.end(row)

    @precondition(lambda self: len(self.tree) > 4)
    @rule()
    def clear(self) -> None:
        self.tree.clear()
        for prefix in list(self.naive.stored):
            self.naive.forget(prefix)

    # ---- what always holds

    @invariant()
    def both_agree_and_the_account_adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, naive = self.pool, self.naive
        free, cached = naive.free(), naive.cached()
        assert pool.account() == (pool.total, pool.total - len(free) - len(cached), len(free), len(cached))
        assert set(pool._free) == free
        assert len(pool._free) == len(free)
        assert pool._owners == [0, *(len(naive.owners[page]) for page in range(1, pool.total + 1))]
        assert pool.available == len(free) + len(cached) - self.promised() >= 0
        assert pool.peak_used == naive.peak_used
        for row in self.texts:
            assert all(row in naive.owners[page] for page in row.pages + row.ahead)
            assert len(row.pages) == self.needed(row.exact_length)
            assert self.listed.get(row, [])[: row.listed] == (row.pages + row.ahead)[: row.listed]
        owned = sum(len(row.pages) + len(row.ahead) for row in self.texts)
        assert sum(naive.rows_with(page) for page in naive.owners) == owned

    @invariant()
    def the_least_recently_used_are_next(self) -> None:
        if hasattr(self, "pool"):
            assert [*self.tree._pages.values()] == self.naive.oldest_first()
            assert len(self.tree) == len(self.naive.stored) == len(set(self.naive.stored.values()))

    @invariant()
    def pages_hold_what_they_are_found_for(self) -> None:
        if not hasattr(self, "pool"):
            return
        for page in self.naive.free():
            self.memory[page] = [POISON] * self.size
        for row, text in self.texts.items():
            assert row.exact_length == len(text[1])
            slots = [divmod(token, self.size) for token in range(row.exact_length)]
            assert [self.memory[row.pages[page]][slot] for page, slot in slots] == self.contents(text, row.exact_length)
        for (salt, tokens), page in self.naive.stored.items():
            assert self.memory[page] == self.contents((salt, tokens), len(tokens))[-self.size :]


class TestRequests(Requests.TestCase):  # type: ignore[misc]
    settings = settings(derandomize=True, deadline=None, max_examples=15, stateful_step_count=40)


@pytest.mark.whole
class TestManyRequests(Requests.TestCase):  # type: ignore[misc]
    settings = settings(deadline=None, max_examples=400, stateful_step_count=100, database=None)


SIZE = 4


@pytest.fixture
def pool() -> PagePool:
    return PagePool(11, SIZE)


@pytest.fixture
def tree(pool: PagePool) -> PrefixTree:
    return PrefixTree(pool)


def text(*pages: int, more: int = 0) -> NDArray[np.int64]:
    """Tokens that fill pages, one number a page, and some more."""
    return np.array([page for page in pages for _ in range(SIZE)] + [-1] * more, dtype=np.int64)


def row_of(pool: PagePool, ids: Sequence[int] | NDArray[np.int64]) -> Row:
    row = Row(pool, 0)
    row.grow(len(ids))
    return row


def store(tree: PrefixTree, pool: PagePool, ids: NDArray[np.int64]) -> list[int]:
    """Insert a row that ends at once; returns its pages."""
    row = row_of(pool, ids)
    pages = list(row.pages)
    tree.insert(ids, pages)
    row.free()
    return pages


def test_ids_of_another_type_match_too(tree, pool):
    pages, ids = store(tree, pool, text(1, 2)), text(1, 2, more=1)
    for other in (ids.astype(np.int32), np.repeat(ids, 2)[::2]):
        assert tree.match(other).pages == pages


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1], "insert: 8 tokens take 2 pages; got 1"),
        ([1, NULL_PAGE], r"insert: pages \[0\] belong to no row"),
        ([1, 9], r"insert: pages \[9\] belong to no row"),
        ([2, 3], r"insert: pages \[3\] .* are in the tree with other tokens before"),
        ([1, 1], "one is given twice"),
    ],
)
def test_pages_that_cannot_be_kept_are_refused(tree, pool, pages, message):
    row, other = row_of(pool, text(1, 2)), row_of(pool, text(5))
    assert (row.pages, other.pages) == ([1, 2], [3])
    tree.insert(text(5), other.pages)
    with pytest.raises(ValueError, match=message):
        tree.insert(text(1, 2), pages)
    assert len(tree) == 1
    tree.insert(text(1, 2), row.pages)
    row.free()
    other.free()
    assert pool.account() == (10, 0, 7, 3)


def test_one_tree_a_pool_until_it_is_cleared(tree, pool):
    store(tree, pool, text(1))
    other, row = PrefixTree(pool), row_of(pool, text(1))
    with pytest.raises(ValueError, match=r"another prefix tree holds pages of this pool; clear\(\)"):
        other.insert(text(1), row.pages)
    tree.clear()
    other.insert(text(1), row.pages)
    row.free()
    assert (len(tree), len(other), pool.account()) == (0, 1, (10, 0, 9, 1))


def test_notes_go_with_their_pages(tree, pool):
    store(tree, pool, text(1, 2))
    seen: list[tuple[int, object]] = []

    def named(*names: str) -> Callable[[int, object], str]:
        def note(page: int, kept: object) -> str:
            seen.append((page, kept))
            return names[page]

        return note

    tree.note(text(1, 2, more=1), named("earlier", "two", "of a page that ids do not fill"))
    tree.note(text(1, 3), named("one", "of a page that is not there"))
    assert seen == [(0, None), (1, None), (0, "earlier")]
    assert tree.notes(text(1, 2, 3)) == ["one", "two"]
    assert tree.notes(text(1), salt="a") == []
    store(tree, pool, text(1, 3))
    assert tree.notes(text(1, 3)) == ["one", None]
    row_of(pool, text(*range(8))).free()  # the oldest leaf goes
    store(tree, pool, text(1, 2))
    assert tree.notes(text(1, 2)) == ["one", None]
    tree.clear()
    store(tree, pool, text(1))
    assert tree.notes(text(1)) == [None]


def test_what_rows_share_is_not_forgotten(tree, pool):
    store(tree, pool, text(1, 2))
    for _ in range(2):
        Row(pool, 0).begin_from(tree.match(text(1, 2, more=1)).pages)
    store(tree, pool, text(3))
    row_of(pool, text(*range(8)))
    assert pool.account() == (10, 10, 0, 0)
    assert len(tree.match(text(1, 2, 3)).pages) == len(tree) == 2


def test_only_an_empty_row_begins_from_pages(tree, pool):
    store(tree, pool, text(1))
    row, pages = row_of(pool, text(2)), tree.match(text(1, 2)).pages
    with pytest.raises(ValueError, match="a row of 4 tokens cannot begin again"):
        row.begin_from(pages)
    pool.give_back(pages)
    assert (row.exact_length, pool.account()) == (4, (10, 1, 8, 1))


def test_another_row_begins_as_one_that_began_from_pages(tree, pool):
    store(tree, pool, text(1))
    leader, row = Row(pool, 0), Row(pool, 0)
    leader.begin_from(tree.match(text(1, 2, 3)).pages)
    leader.reserve(3 * SIZE)
    assert row.begin_as(leader, 3 * SIZE) == 2 * SIZE
    assert row.pages == leader.pages
    row.free()
    leader.free()
    assert pool.account() == (10, 0, 9, 1)


def test_running_batches_are_not_disturbed(tree, pool):
    """A step that repeats itself stays valid: what a tree owns, no row writes into."""
    store(tree, pool, text(1, 2))
    period, row = pool.validity.period, Row(pool, 0)
    row.begin_from(tree.match(text(1, 2, 3)).pages)
    row.grow(8 * SIZE)
    tree.insert(text(1, 2, 3, 4), row.pages)
    tree.clear()
    assert pool.validity.period is period


def test_threads_use_one_tree():
    pool = PagePool(25, SIZE)
    tree = PrefixTree(pool)

    def requests(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            ids = text(*rng.integers(0, 2, rng.integers(1, 5)), more=1)
            row = Row(pool, 0)
            row.begin_from(tree.match(ids).pages)
            row.grow(len(ids) - row.exact_length)
            tree.insert(ids, row.pages)
            row.free()
            if rng.random() < 0.05:
                tree.clear()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(requests, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert pool.account() == (24, 0, 24 - len(tree), len(tree))
    assert pool.available == 24
