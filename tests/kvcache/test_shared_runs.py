"""Runs of shared pages are those that a naive model finds in the rows' present page numbers, whatever happened before.

Real rows, with a pool and a prefix tree, change in random order; the model compares all pairs of rows, and tries all
choices of runs.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_llm.execution.cascade import shared_runs
from compiled_llm.execution.cascade.shared_runs import Paged, SharedRuns
from compiled_llm.kvcache.errors import OutOfPagesError
from compiled_llm.kvcache.pool import PagePool
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.kvcache.row import Row, reject
from compiled_llm_ops.attention.cascade.tables import SharedRun

pytestmark = pytest.mark.core

SIZE = 4
LEVELS = 3


class Rules(NamedTuple):
    """The arguments of ``SharedRuns``."""

    page_size: int = SIZE
    least_pages: int = 1
    least_saved: int = 1


class PlainRow:
    """A row of given pages, which are written over as in no pool."""

    def __init__(self, pages: Sequence[int]) -> None:
        """Its newest token is in a page of its own, behind these."""
        self.pages = [*pages, 10_000_000 + id(self) % 1_000_000]
        self.length_at_most = len(pages) * SIZE + 1
        self.page_period = object()


# ---- the naive model


def unwritten(row: Paged, rules: Rules) -> list[int]:
    return row.pages[: max(0, row.length_at_most - 1) // rules.page_size]


def beginnings(texts: Sequence[list[int]]) -> dict[tuple[int, ...], list[int]]:
    """The longest pages that some two rows begin with, and all rows that do."""
    found: dict[tuple[int, ...], list[int]] = {}
    for one, other in combinations(texts, 2):
        same = 0
        while same < min(len(one), len(other)) and one[same] == other[same]:
            same += 1
        if same:
            begin = tuple(one[:same])
            found[begin] = [at for at, text in enumerate(texts) if tuple(text[:same]) == begin]
    return found


def saved_by(begin: tuple[int, ...], rows: Sequence[int], start: int) -> int:
    return (len(rows) - 1) * (len(begin) - start)


def most_saved(texts: Sequence[list[int]], rules: Rules) -> int:
    """The most reads of pages that any choice of beginnings saves."""
    begins, best = beginnings(texts), 0
    for mask in range(2 ** len(begins)):
        chosen = [begin for bit, begin in enumerate(begins) if mask >> bit & 1]
        saved = 0
        for begin in chosen:
            above = [len(other) for other in chosen if len(other) < len(begin) and begin[: len(other)] == other]
            start, own = max(above, default=0), saved_by(begin, begins[begin], max(above, default=0))
            if len(above) >= LEVELS or len(begin) - start < rules.least_pages or own < max(1, rules.least_saved):
                break
            saved += own
        else:
            best = max(best, saved)
    return best


def check(runs: Sequence[SharedRun], rows: Sequence[Paged], rules: Rules) -> int:
    """All that is said of the runs holds; return what they save."""
    texts, saved = [unwritten(row, rules) for row in rows], 0
    ends, levels = [0] * len(rows), [0] * len(rows)
    begins = beginnings(texts)
    for run in runs:
        begin = tuple(texts[run.rows[0]][: run.first_page + run.pages])
        assert list(run.rows) == begins[begin]  # all rows that begin so, and no other
        assert all(type(at) is int for at in run.rows)
        for at in run.rows:
            assert ends[at] == run.first_page, "a row's runs follow each other from its first page on"
            ends[at] += run.pages
            levels[at] += 1
        own = saved_by(begin, run.rows, run.first_page)
        assert run.pages >= rules.least_pages
        assert own >= max(1, rules.least_saved)
        saved += own
    assert max(levels, default=0) <= LEVELS
    assert [(run.first_page, run.rows) for run in runs] == sorted((run.first_page, run.rows) for run in runs)
    return saved


def renumbered(runs: Sequence[SharedRun], order: Sequence[int]) -> set[SharedRun]:
    """``order[i]`` is the place that row i of the runs has elsewhere."""
    return {run._replace(rows=tuple(sorted(order[at] for at in run.rows))) for run in runs}


# ---- rows of a pool, in random order


class UnreadStep:
    """A step that has rejected some of the tokens by which it has grown a row."""

    def __init__(self, row: Row, rejected: int) -> None:
        self._row, self.new_tokens = row, rejected + 1
        row.speculation.unread += (self,)

    def sync(self) -> None:
        reject(self, [self._row], [1])


class Batches(RuleBasedStateMachine):
    """Rows with their tokens, of which few are different, and one ``SharedRuns`` for batches of some of them."""

    @initialize(least_pages=st.sampled_from([1, 1, 1, 2]), least_saved=st.sampled_from([1, 1, 1, 4]))
    def start(self, least_pages: int, least_saved: int) -> None:
        self.pool = PagePool(201, SIZE)
        self.tree = PrefixTree(self.pool)
        self.rules = Rules(SIZE, least_pages, least_saved)
        self.shared = SharedRuns(*self.rules)
        self.texts: dict[Row, tuple[int, ...]] = {}
        self.seen: dict[object, list[int]] = {}  # the most pages of each period of a row

    def write(self, row: Row, tokens: tuple[int, ...]) -> None:
        try:
            row.grow(len(tokens))
        except OutOfPagesError:
            return
        self.texts[row] += tokens

    def read(self, row: Row) -> None:
        row.speculation.sync()
        self.texts[row] = self.texts[row][: row.length_at_most]

    def some_row(self, data: st.DataObject) -> Row:
        return data.draw(st.sampled_from(list(self.texts)))

    def some_tokens(self, data: st.DataObject) -> tuple[int, ...]:
        """Some that fill pages alike, and some between them."""
        pages = data.draw(st.lists(st.sampled_from([0, 0, 0, 1]), max_size=5))
        more = data.draw(st.integers(0, SIZE))
        return tuple(token for page in pages for token in [page] * SIZE) + (2,) * more

    def a_beginning(self, data: st.DataObject) -> tuple[int, ...]:
        text = self.texts[self.some_row(data)] if self.texts else ()
        return text[: data.draw(st.integers(0, len(text) // SIZE)) * SIZE]

    def store(self, row: Row) -> None:
        self.read(row)
        self.tree.insert(np.array(self.texts[row], dtype=np.int64), row.pages)

    @rule(data=st.data(), ahead=st.integers(0, 3))
    def admit(self, data: st.DataObject, ahead: int) -> None:
        tokens = (*self.a_beginning(data), *self.some_tokens(data), 3)
        row = Row(self.pool, 0)
        row.begin_from(self.tree.match(np.array(tokens)).pages)
        self.texts[row] = tokens[: row.length_at_most]
        self.write(row, tokens[row.length_at_most :])
        if self.pool.available > ahead:
            row.reserve(row.length_at_most + ahead * SIZE)
        if data.draw(st.booleans()):
            self.store(row)

    @rule(data=st.data())
    def admit_two_that_begin_alike(self, data: st.DataObject) -> None:
        tokens = (*self.some_tokens(data), 3)
        if self.pool.available < 2 * self.pool.pages_for(len(tokens) + 1):
            return
        leader, row = Row(self.pool, len(tokens)), Row(self.pool, 0)
        shared = row.begin_as(leader, len(tokens))
        self.texts[leader] = ()
        self.texts[row] = tokens[:shared]
        self.write(leader, tokens)
        self.write(row, tokens[shared:])

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def admit_one_that_no_tree_helped(self, data: st.DataObject) -> None:
        """Its own pages hold what the tree's do, and those that it adds come into the tree below others."""
        tokens = self.a_beginning(data)
        row = Row(self.pool, 0)
        self.texts[row] = ()
        self.write(row, tokens + self.some_tokens(data))
        self.store(row)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), steps=st.integers(1, 3 * SIZE))
    def grow_some(self, data: st.DataObject, steps: int) -> None:
        for row in data.draw(st.lists(st.sampled_from(list(self.texts)), unique=True)):
            for _ in range(steps):
                self.write(row, (2,))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), copies=st.integers(1, 3))
    def fork(self, data: st.DataObject, copies: int) -> None:
        row = self.some_row(data)
        self.read(row)
        for _ in range(copies):
            self.texts[row.fork()] = self.texts[row]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=st.booleans())
    def rewind(self, data: st.DataObject, more: bool) -> None:
        row = self.some_row(data)
        self.read(row)
        kept = data.draw(st.integers(0, row.length_at_most))
        row.rewind(kept)
        self.texts[row] = self.texts[row][:kept]
        if more:
            self.write(row, self.some_tokens(data))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=st.integers(1, 2 * SIZE))
    def verify(self, data: st.DataObject, tokens: int) -> None:
        """Grow by tokens of which not all will count."""
        row = self.some_row(data)
        before = row.length_at_most
        self.write(row, (1,) * tokens)
        if row.length_at_most > before:
            UnreadStep(row, data.draw(st.integers(0, tokens - 1)))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), settles=st.booleans())
    def read_counts(self, data: st.DataObject, settles: bool) -> None:
        row = self.some_row(data)
        self.read(row)
        if settles:
            row.release_unused()

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), pages=st.integers(1, 3))
    def enter_a_listed_page(self, data: st.DataObject, pages: int) -> None:
        row = self.some_row(data)
        self.read(row)
        row.list_pages(pages)
        if row.ahead and row.length_at_most and row.length_at_most % SIZE == 0:
            row.enter_page()
            row.length_at_most += 1
            self.texts[row] += (2,)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), ends=st.booleans())
    def insert(self, data: st.DataObject, ends: bool) -> None:
        row = self.some_row(data)
        self.store(row)
        if ends:
            self.end(row)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """A row gives all pages back and is computed again."""
        row = self.some_row(data)
        self.read(row)
        tokens = self.texts[row]
        row.free()
        row.begin_from(self.tree.match(np.array((*tokens, 3), dtype=np.int64)).pages)
        self.texts[row] = tokens[: row.length_at_most]
        self.write(row, tokens[row.length_at_most :])

    @precondition(lambda self: len(self.texts) > 3)
    @rule(data=st.data())
    def end_some(self, data: st.DataObject) -> None:
        for row in data.draw(st.lists(st.sampled_from(list(self.texts)), unique=True)):
            self.end(row)

    def end(self, row: Row) -> None:
        row.free()
        del self.texts[row]

    @invariant()
    def pages_of_one_period_begin_alike(self) -> None:
        for row in getattr(self, "texts", ()):
            fewer, more = sorted([row.pages, self.seen.get(row.page_period, [])], key=len)
            assert more[: len(fewer)] == fewer
            self.seen[row.page_period] = list(more)

    @precondition(lambda self: len(self.tree) > 20)
    @rule()
    def clear_the_tree(self) -> None:
        self.tree.clear()

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def run_some(self, data: st.DataObject) -> None:
        """They are grown by the token that they feed in, which lies in a page of their own."""
        rows = data.draw(st.lists(st.sampled_from(list(self.texts)), unique=True, max_size=9))
        for row in rows:
            self.write(row, (2,))
        self.compare(rows)

    @precondition(lambda self: self.texts)
    @rule(steps=st.integers(1, 2 * SIZE))
    def run_all_for_some_steps(self, steps: int) -> None:
        for _ in range(steps):
            rows = [*self.texts][:9]
            runs = self.shared.runs(rows)
            steady, lengths = self.shared.steady, [row.length_at_most for row in rows]
            periods = [row.page_period for row in rows]
            for row in rows:
                self.write(row, (2,))
            grown = all(
                row.length_at_most >= length for row, length in zip(rows, lengths, strict=True)
            )  # counts may be read
            if steady and grown and periods == [row.page_period for row in rows]:
                assert self.shared.runs(rows) is runs
            self.compare(rows)

    @precondition(lambda self: self.texts)
    @rule(rng=st.randoms())
    def look(self, rng: random.Random) -> None:
        """Also at rows that are not grown, and whose last page others share."""
        rows = [*self.texts]
        rng.shuffle(rows)
        self.compare(rows[:9])

    def compare(self, rows: Sequence[Row]) -> None:
        runs = self.shared.runs(rows)
        assert check(runs, rows, self.rules) == most_saved([unwritten(row, self.rules) for row in rows], self.rules)
        assert self.shared.runs(rows) is runs
        assert SharedRuns(*self.rules).runs(rows) == runs, "it follows from the present rows alone"
        order = list(range(len(rows)))[::-1]
        assert renumbered(SharedRuns(*self.rules).runs(rows[::-1]), order) == set(runs)


class TestBatches(Batches.TestCase):  # type: ignore[misc]
    settings = settings(derandomize=True, deadline=None, max_examples=15, stateful_step_count=40)


@pytest.mark.whole
class TestManyBatches(Batches.TestCase):  # type: ignore[misc]
    settings = settings(deadline=None, max_examples=400, stateful_step_count=100, database=None)


# ---- rows of any pages


def at_random(rng: random.Random, rows: int, pages: int) -> list[PlainRow]:
    """Rows that begin as an earlier one does, for some pages."""
    texts: list[list[int]] = []
    for _ in range(rows):
        text = list(rng.choice(texts)) if texts and rng.random() < 0.9 else []
        text = text[: rng.randint(0, len(text))]
        while len(text) < pages and rng.random() < 0.9:
            text.append(rng.choice([1, 2, 3, 256, 65536]))
        texts.append(text)
    return [PlainRow(text) for text in texts]


@pytest.mark.parametrize("seed", range(40))
def test_any_pages_give_the_runs_that_save_most(seed: int) -> None:
    rng = random.Random(seed)
    rules = Rules(SIZE, rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 5]))
    shared, rows = SharedRuns(*rules), at_random(rng, 8, 12)
    for _ in range(10):
        runs = shared.runs(rows)
        assert check(runs, rows, rules) == most_saved([unwritten(row, rules) for row in rows], rules)
        assert runs == SharedRuns(*rules).runs(rows)
        leaving = rng.randrange(8)
        rows = [row for at, row in enumerate(rows) if at != leaving] + at_random(rng, 1, 12)
        rng.shuffle(rows)
        for row in rng.sample(rows, 3):
            at = rng.randrange(len(row.pages))
            row.pages[at], row.page_period = rng.randint(1, 3), object()
        rows[0].length_at_most = rng.randint(0, len(rows[0].pages) * SIZE)  # with the same pages


def nested(depth: int) -> list[PlainRow]:
    """Each row has one page more in common with those behind it."""
    return [PlainRow([*range(1, pages + 1), 1000 + pages]) for pages in range(1, depth + 1)]


def best_of_nested(depth: int) -> int:
    """By trying all: the k-th beginning has k pages and ``depth - k + 1`` rows."""
    ends = range(depth + 1)
    return max(
        (depth - one) * one + (depth - two) * (two - one) + (depth - three) * (three - two)
        for one in ends
        for two in ends[one:]
        for three in ends[two:]
    )


@pytest.mark.parametrize(("depth", "share"), [(4, 1.0), (33, 1.0), (60, 0.5), (120, 0.5)])
def test_many_nested_beginnings_save_half_of_the_most_or_more(depth: int, share: float) -> None:
    rows, rules = nested(depth), Rules()
    shared = SharedRuns(*rules)
    saved = check(shared.runs(rows), rows, rules)
    assert saved >= share * best_of_nested(depth)
    print(f"{depth} rows: {saved / best_of_nested(depth):.3f} of the most")
    fewer = rows[: depth // 8]  # the search becomes exact, over what the other one knew
    assert shared.runs(fewer) == SharedRuns(*rules).runs(fewer)
    assert shared.runs(rows) == SharedRuns(*rules).runs(rows)


@pytest.mark.parametrize("seed", range(3))
def test_many_rows_save_half_of_the_most_or_more(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    rows, rules = at_random(rng, 150, 60), Rules()
    runs = SharedRuns(*rules).runs(rows)
    monkeypatch.setattr(shared_runs, "_EXACT", 10_000)
    best = check(SharedRuns(*rules).runs(rows), rows, rules)
    saved = check(runs, rows, rules)
    print(f"seed {seed}: {saved / best:.3f} of the most")
    assert best / 2 <= saved <= best


def test_three_levels_and_no_fourth() -> None:
    """All share four pages, half of them eight, a quarter twelve, two of them sixteen."""
    text = list(range(1, 17))
    rows = [PlainRow([*text[: 4 * depth], 100 + at]) for at, depth in enumerate([1] * 8 + [2] * 4 + [3] * 2 + [4] * 2)]
    everyone, half, quarter = range(16), range(8, 16), range(12, 16)
    assert SharedRuns(SIZE).runs(rows) == (
        SharedRun(tuple(everyone), 0, 4),
        SharedRun(tuple(half), 4, 4),
        SharedRun(tuple(quarter), 8, 4),
    )
    assert SharedRuns(SIZE, least_pages=5).runs(rows) == (SharedRun(tuple(half), 0, 8), SharedRun((14, 15), 8, 8))
    assert SharedRuns(SIZE, least_saved=20).runs(rows) == (
        SharedRun(tuple(everyone), 0, 4),
        SharedRun(tuple(half), 4, 4),
    )


def test_a_page_says_nothing_about_those_before_it() -> None:
    """The tree keeps its own page of equal tokens, and hangs the next one of another row below it."""
    pool = PagePool(20, SIZE)
    tree, tokens = PrefixTree(pool), np.arange(2 * SIZE + 1)
    rows = [Row(pool, 0) for _ in range(3)]
    rows[0].grow(SIZE + 1)
    rows[1].grow(2 * SIZE + 1)
    tree.insert(tokens[: SIZE + 1], rows[0].pages)
    tree.insert(tokens, rows[1].pages)
    rows[2].begin_from(tree.match(tokens).pages)
    rows[2].grow(1)
    assert rows[2].pages[0] == rows[0].pages[0] != rows[1].pages[0]
    assert rows[2].pages[1] == rows[1].pages[1]
    assert SharedRuns(SIZE).runs(rows) == (SharedRun((0, 2), 0, 1),)


def test_the_page_of_the_newest_token_is_in_no_run() -> None:
    pool = PagePool(20, SIZE)
    row = Row(pool, 0)
    row.grow(2 * SIZE)
    rows, shared = [row, row.fork()], SharedRuns(SIZE)
    assert shared.runs(rows) == (SharedRun((0, 1), 0, 1),)
    assert not shared.steady
    for each in rows:
        each.grow(1)
    assert shared.runs(rows) == (SharedRun((0, 1), 0, 2),)


def test_rows_that_only_grow_change_nothing() -> None:
    pool = PagePool(50, SIZE)
    row = Row(pool, 0)
    row.grow(2 * SIZE + 1)
    rows, shared = [row, row.fork(), row.fork()], SharedRuns(SIZE)
    for _ in range(2 * SIZE):
        for each in rows:
            each.grow(1)
        runs = shared.runs(rows)
    assert shared.steady
    for _ in range(3 * SIZE):
        for each in rows:
            each.grow(1)
        assert shared.runs(rows) is runs


def test_pages_that_went_ahead_and_were_given_back_come_to_others() -> None:
    pool = PagePool(50, SIZE)
    row = Row(pool, 0)
    row.grow(2 * SIZE)
    rows, shared = [row, row.fork()], SharedRuns(SIZE)
    row.grow(SIZE + 1)
    UnreadStep(row, SIZE + 1)
    shared.runs(rows)
    given_back = row.pages[2]
    row.speculation.sync()
    row.release_unused()
    Row(pool, 0).grow(1)  # it takes the page that was given back last
    rows[1].grow(1)
    assert rows[1].pages[2] == given_back
    row.grow(2 * SIZE)
    rows[1].grow(2 * SIZE)
    assert shared.runs(rows) == (SharedRun((0, 1), 0, 2),)


def test_no_row_is_kept_alive() -> None:
    pool = PagePool(50, SIZE)
    row = Row(pool, 0)
    row.grow(2 * SIZE + 1)
    rows, shared = [row, row.fork()], SharedRuns(SIZE)
    shared.runs(rows)
    seen = [weakref.ref(row) for row in rows]
    del rows, row
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
    assert shared.runs([]) == ()


def test_what_is_gone_is_forgotten() -> None:
    rng, shared = random.Random(0), SharedRuns(SIZE)
    for _ in range(20):
        shared.runs(at_random(rng, 20, 30))
    shared.runs([])
    empty = shared._empty
    assert (empty.below, empty.shared, empty.members, empty.ends) == ({}, {}, {}, set())
    assert (shared._beginnings, shared._nodes, shared._stops, shared._index) == (0, {}, {}, {})


def test_a_failure_in_between_does_not_stay() -> None:
    """The next call begins anew."""
    rows, shared = nested(5), SharedRuns(SIZE)
    runs = shared.runs(rows)
    broken = PlainRow([1, 2, 3])
    broken.pages[1] = 2**40
    with pytest.raises(OverflowError):
        shared.runs([broken, *rows[1:]])
    assert shared.runs(rows) == runs
