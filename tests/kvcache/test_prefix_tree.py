"""A prefix tree finds pages that hold the beginning of a prompt, and gives them up when others want them."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from compiled_llm.kvcache.pool import NULL_PAGE, OutOfPagesError, PagePool
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.kvcache.row import PageCopy, Row

pytestmark = pytest.mark.core

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


def store(tree: PrefixTree, pool: PagePool, ids: NDArray[np.int64], salt: Hashable = None) -> list[int]:
    """Insert a row that ends at once; returns its pages."""
    row = row_of(pool, ids)
    pages = list(row.pages)
    tree.insert(ids, pages, salt)
    row.free()
    return pages


def found(tree: PrefixTree, pool: PagePool, ids: NDArray[np.int64], salt: Hashable = None) -> int:
    """How many pages of a prompt are found, which nobody takes."""
    pages = tree.match(ids, salt)
    pool.give_back(pages)
    return len(pages)


# ---- match and insert


def test_full_pages_are_kept_and_found_again(tree, pool):
    pages = store(tree, pool, text(1, 2, more=3))
    assert (len(tree), pool.account()) == (2, (10, 0, 8, 2))
    assert tree.match(text(1, 2, more=1)) == pages[:2]
    assert pool.account() == (10, 2, 8, 0)


@pytest.mark.parametrize(("more", "pages"), [(0, 1), (1, 2), (SIZE, 2)])
def test_at_least_one_token_is_left_to_compute(tree, pool, more, pages):
    store(tree, pool, text(1, 2))
    assert found(tree, pool, text(1, 2, more=more)) == pages


@pytest.mark.parametrize("tokens", [0, 1, SIZE])
def test_a_prompt_of_one_page_matches_nothing(tree, pool, tokens):
    store(tree, pool, text(1))
    assert tree.match(text(1)[:tokens]) == []


def test_a_prompt_matches_as_far_as_it_is_equal(tree, pool):
    pages = store(tree, pool, text(1, 2, 3))
    assert tree.match(text(1, 2, 7, 3)) == pages[:2]
    assert tree.match(text(7, 2, 3)) == []


def test_ids_of_another_type_match_too(tree, pool):
    store(tree, pool, text(1, 2))
    other: Any = text(1, 2, more=1).astype(np.int32)
    assert found(tree, pool, other) == 2
    assert found(tree, pool, np.repeat(text(1, 2, more=1), 2)[::2]) == 2


@pytest.mark.parametrize("salt", ["a", 0, 1, 2, True, (None,), ((None,),)])
def test_salts_are_told_apart(tree, pool, salt):
    pages = store(tree, pool, text(1, 2))
    assert tree.match(text(1, 2, 3), salt) == []
    others = store(tree, pool, text(1, 2), salt)
    assert set(others).isdisjoint(pages)
    assert tree.match(text(1, 2, 3), salt) == others
    assert tree.match(text(1, 2, 3)) == pages


def test_the_older_page_stays_and_what_follows_hangs_below_it(tree, pool):
    first, second = row_of(pool, text(1)), row_of(pool, text(1, 2))
    tree.insert(text(1), first.pages)
    tree.insert(text(1, 2), second.pages)
    assert tree.match(text(1, 2, 3)) == [first.pages[0], second.pages[1]]
    second.free()
    assert pool.account().used == 2  # the second row's first page has gone


def test_a_row_that_is_inserted_again_adds_what_is_new(tree, pool):
    row = row_of(pool, text(1))
    tree.insert(text(1), row.pages)
    row.grow(2 * SIZE + 1)
    for _ in range(2):
        tree.insert(text(1, 2, 3, more=1), row.pages)
        assert len(tree) == 3
    row.free()
    assert pool.account() == (10, 0, 7, 3)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1], "insert: 8 tokens fill 2 pages; got 1"),
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


# ---- eviction


def test_cached_pages_are_available_and_given_up_when_free_ones_run_out(tree, pool):
    store(tree, pool, text(1, 2, 3))
    row = Row(pool, 8 * SIZE)
    assert pool.available == 2
    row.grow(7 * SIZE)
    assert pool.account() == (10, 7, 0, 3)
    row.grow(1)
    assert (pool.account(), found(tree, pool, text(1, 2, 3, 4))) == ((10, 8, 0, 2), 2)
    with pytest.raises(OutOfPagesError, match="3 pages are needed and 2 of 10 are available"):
        Row(pool, 3 * SIZE)


def test_the_least_recently_used_leaf_goes_first(tree, pool):
    store(tree, pool, text(1, 2))
    store(tree, pool, text(1, 3))
    store(tree, pool, text(4))
    assert found(tree, pool, text(1, 2, 5)) == 2
    row = Row(pool, 0)
    for left in (3, 2, 1, 0):  # [1, 3], then [4], then [1, 2], then [1]
        row.grow((10 - left) * SIZE - row.length)
        assert len(tree) == left
        assert found(tree, pool, text(1, 3, 5)) == min(1, left)
        assert found(tree, pool, text(4, 5)) == (left > 2)
        assert found(tree, pool, text(1, 2, 5)) == min(2, left)


def test_an_insert_is_a_use_of_what_was_there(tree, pool):
    store(tree, pool, text(1))
    store(tree, pool, text(2))
    store(tree, pool, text(1))
    row_of(pool, text(*range(9)))
    assert (found(tree, pool, text(1, 0)), found(tree, pool, text(2, 0))) == (1, 0)


def test_a_page_that_a_row_owns_stays_the_rows(tree, pool):
    row = row_of(pool, text(1, 2))
    tree.insert(text(1, 2), row.pages)
    store(tree, pool, text(3))
    other = row_of(pool, text(*range(8)))
    assert (len(tree), len(row.pages), pool.account()) == (0, 2, (10, 10, 0, 0))
    assert set(row.pages).isdisjoint(other.pages)
    tree.insert(text(1, 2), row.pages)
    row.free()
    assert (len(tree), pool.account()) == (2, (10, 8, 0, 2))


def test_a_match_takes_no_page_that_was_promised(tree, pool):
    pages = store(tree, pool, text(1, 2, 3))
    promised = Row(pool, 9 * SIZE)
    assert tree.match(text(1, 2, 3, 4)) == pages[:1]
    assert tree.match(text(1, 2, 3, 4)) == pages[:1]  # which is a row's by now
    promised.grow(9 * SIZE)
    assert pool.account() == (10, 10, 0, 0)


def test_clearing_frees_what_no_row_holds(tree, pool):
    row = row_of(pool, text(1, 2))
    tree.insert(text(1, 2), row.pages)
    store(tree, pool, text(1, 3))
    assert pool.account() == (10, 2, 7, 1)
    tree.clear()
    assert (len(tree), tree.match(text(1, 2, 3)), pool.account()) == (0, [], (10, 2, 8, 0))
    tree.clear()
    row.free()
    assert pool.account() == (10, 0, 10, 0)


def test_the_most_used_counts_what_rows_own(tree, pool):
    store(tree, pool, text(1, 2, 3))
    store(tree, pool, text(4, 5))
    assert pool.peak_used == 3
    tree.match(text(1, 2, 3, 0))
    tree.match(text(4, 5, 0))
    assert pool.peak_used == 5


# ---- rows


def test_a_row_begins_from_matched_pages(tree, pool):
    pages = store(tree, pool, text(1, 2))
    row = Row(pool, 0)
    row.begin_from(tree.match(text(1, 2, more=3)))
    assert (row.pages, row.length, row.position, row.limit) == (pages, 8, 8, 8)
    row.reserve(20)
    assert (row.limit, pool.available) == (20, 5)
    assert row.grow(3) is None
    row.free()
    assert (len(tree), pool.account()) == (2, (10, 0, 8, 2))


def test_only_an_empty_row_begins_from_pages(tree, pool):
    store(tree, pool, text(1))
    row, pages = row_of(pool, text(2)), tree.match(text(1, 2))
    with pytest.raises(ValueError, match="a row of 4 tokens cannot begin anew"):
        row.begin_from(pages)
    pool.give_back(pages)
    assert (row.length, pool.account()) == (4, (10, 1, 8, 1))


def test_another_row_begins_as_one_that_began_from_pages(tree, pool):
    store(tree, pool, text(1))
    leader, row = Row(pool, 0), Row(pool, 0)
    leader.begin_from(tree.match(text(1, 2, 3)))
    leader.reserve(3 * SIZE)
    assert row.begin_as(leader, 3 * SIZE) == 2 * SIZE
    assert row.pages == leader.pages
    row.free()
    leader.free()
    assert pool.account() == (10, 0, 9, 1)


def test_a_row_copies_a_page_of_the_tree_before_it_writes_there(tree, pool):
    row = row_of(pool, text(1, 2))
    tree.insert(text(1, 2), row.pages)
    row.shrink(1)
    assert row.missing(7 + 1) == 1
    kept = row.pages[1]
    assert row.grow(1) == PageCopy(kept, row.pages[1])
    assert tree.match(text(1, 2, 3)) == [row.pages[0], kept]


def test_a_row_that_shrinks_keeps_its_promise(tree, pool):
    row = row_of(pool, text(1, 2, 3))
    tree.insert(text(1, 2, 3), row.pages)
    assert row.missing(12, kept=4) == 0
    row.shrink(8)
    assert (row.limit, pool.account(), pool.available) == (12, (10, 1, 7, 2), 7)
    others = Row(pool, 7 * SIZE)
    others.grow(7 * SIZE)
    row.grow(8)
    assert (len(tree), pool.account()) == (1, (10, 10, 0, 0))


def test_running_batches_are_not_disturbed(tree, pool):
    """A batch looks at its rows again after ``changes``; what a tree owns, no row writes into."""
    store(tree, pool, text(1, 2))
    changes, row = pool.changes, Row(pool, 0)
    row.begin_from(tree.match(text(1, 2, 3)))
    row.grow(8 * SIZE)
    tree.insert(text(1, 2, 3, 4), row.pages)
    tree.clear()
    assert pool.changes == changes


# ---- threads


def test_threads_use_one_tree():
    pool = PagePool(25, SIZE)
    tree = PrefixTree(pool)

    def requests(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(60):
            ids = text(*rng.integers(0, 2, rng.integers(1, 5)), more=1)
            row = Row(pool, 0)
            row.begin_from(tree.match(ids))
            row.grow(len(ids) - row.length)
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
