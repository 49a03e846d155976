"""Pages never get lost, never have two owners, and a promise is kept; the page table says where they are."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compiled_llm.execution.state.decode_buffers import bucket_for, buckets_up_to
from compiled_llm.kvcache.memory import allocate_pages
from compiled_llm.kvcache.pool import NULL_PAGE, OutOfPagesError, PagePool, Promise
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.table import Span, build_table
from compiled_llm.model.layer_probe import Layer

pytestmark = pytest.mark.core

deterministic = settings(derandomize=True, deadline=None, max_examples=60)


def pages_needed(tokens: int, page_size: int) -> int:
    return (tokens + page_size - 1) // page_size


class Pages(RuleBasedStateMachine):
    """Rows of one pool, beside each what it holds, and a memory of pages with the tokens as they were written."""

    @initialize(pages=st.integers(1, 24), page_size=st.integers(1, 5))
    def start(self, pages: int, page_size: int) -> None:
        self.pool, self.size = PagePool(pages + 1, page_size), page_size
        self.rows: dict[Row, list[int]] = {}
        self.slots: dict[Row, list[int]] = {}  # the page numbers that a device knows of each
        self.memory = [[0] * page_size for _ in range(pages + 1)]
        self.written = 0

    def write(self, row: Row, tokens: int) -> None:
        """Grow a row and do what its pages need, as a device would."""
        copies = tokens > 0 and self.shares_its_last_page(row)
        copy = row.grow(tokens)
        assert (copy is not None) == copies
        if copy is not None:
            self.memory[copy.target] = list(self.memory[copy.source])
        for _ in range(tokens):
            self.written += 1
            page, slot = divmod(len(self.rows[row]), self.size)
            self.memory[row.pages[page]][slot] = self.written
            self.rows[row].append(self.written)

    def shares_its_last_page(self, row: Row) -> bool:
        others = [page for other in self.rows if other is not row for page in other.pages]
        return row.length % self.size > 0 and row.pages[-1] in others

    def snapshot(self) -> object:
        return self.pool.account(), self.pool.available, [(r.length, r.limit, tuple(r.pages)) for r in self.rows]

    @rule(tokens=st.integers(0, 40))
    def admit(self, tokens: int) -> None:
        before, fits = self.snapshot(), pages_needed(tokens, self.size) <= self.pool.available
        try:
            row = Row(self.pool, tokens)
        except OutOfPagesError:
            assert not fits
            assert self.snapshot() == before
        else:
            assert fits
            assert (row.length, row.pages) == (0, [])
            assert row.limit >= tokens
            self.rows[row] = []

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def grow_within_the_promise(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(list(self.rows)))
        available, promised = self.pool.available, row.limit
        tokens = data.draw(st.integers(0, promised - row.length))
        copies = tokens > 0 and self.shares_its_last_page(row)
        if copies and not available:
            return
        self.write(row, tokens)
        assert (self.pool.available, row.limit) == (available - copies, promised)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), tokens=st.integers(0, 60))
    def grow_beyond_it(self, data: st.DataObject, tokens: int) -> None:
        row = data.draw(st.sampled_from(list(self.rows)))
        before, available = self.snapshot(), self.pool.available
        missing = max(0, pages_needed(row.length + tokens, self.size) - row.limit // self.size)
        missing += tokens > 0 and self.shares_its_last_page(row)
        assert row.missing(row.length + tokens) == missing
        try:
            self.write(row, tokens)
        except OutOfPagesError as error:
            said = str(error)
            assert missing > available
            assert said == f"{missing} pages are needed and {available} of {self.pool.total} are available"
            assert self.snapshot() == before
        else:
            assert missing <= available

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), tokens=st.integers(0, 60))
    def reserve(self, data: st.DataObject, tokens: int) -> None:
        row = data.draw(st.sampled_from(list(self.rows)))
        before = self.snapshot()
        try:
            row.reserve(tokens)
        except OutOfPagesError:
            assert self.snapshot() == before
        else:
            assert row.limit >= tokens
            again = self.snapshot()
            row.reserve(tokens)
            assert self.snapshot() == again

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(list(self.rows)))
        promised, kept = row.limit, row.length - data.draw(st.integers(0, row.length))
        pages = row.pages[: pages_needed(kept, self.size)]
        shared = {page for other in self.rows if other is not row for page in other.pages}
        dropped = shared.intersection(row.pages[len(pages) :])
        more = data.draw(st.integers(0, 20))
        missing = row.missing(kept + more, kept)
        row.shrink(row.length - kept)
        del self.rows[row][kept:]
        assert (row.limit, row.length, row.pages) == (promised - len(dropped) * self.size, kept, pages)
        assert row.missing(kept + more) == missing

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def undo_growth(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(list(self.rows)))
        mark, before, text = row.mark(), self.snapshot(), list(self.rows[row])
        copies = self.shares_its_last_page(row)
        try:
            self.write(row, data.draw(st.integers(1, 20)))
        except OutOfPagesError:
            assert self.snapshot() == before
            return
        row.restore(mark)
        self.rows[row] = text
        assert (row.length, row.limit) == next(
            (length, limit)
            for own, (length, limit, _) in zip(self.rows, before[2], strict=True)
            if own is row  # type: ignore[index]
        )
        assert self.pool.available == before[1] - copies  # type: ignore[index]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(list(self.rows)))
        before = self.pool.account(), self.pool.available
        fork = row.fork()
        assert (self.pool.account(), self.pool.available) == before
        assert (fork.length, fork.position, fork.pages) == (row.length, row.position, row.pages)
        self.rows[fork] = list(self.rows[row])

    @precondition(lambda self: any(not text for text in self.rows.values()))
    @rule(data=st.data(), fails=st.booleans())
    def begin_as_another(self, data: st.DataObject, fails: bool) -> None:
        leader = data.draw(st.sampled_from([row for row, text in self.rows.items() if not text]))
        if not leader.limit:
            return
        tokens = data.draw(st.integers(1, leader.limit))
        row = Row(self.pool, 0)
        shared = row.begin_as(leader, tokens)
        assert tokens - self.size <= shared < tokens
        assert self.pool.pages_for(tokens) - shared // self.size == row.missing(tokens)
        self.rows[row] = []
        if fails or row.missing(tokens) > self.pool.available:
            marks = leader.mark(), row.mark()
            leader.grow(tokens)
            leader.restore(marks[0])
            row.restore(marks[1])
            for own in (leader, row) if data.draw(st.booleans()) else (row, leader):
                own.shrink(own.length)
            return
        self.write(leader, tokens)
        self.rows[row] = self.rows[leader][:shared]
        self.write(row, tokens - shared)

    @precondition(lambda self: self.rows)
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
                row, available = data.draw(st.sampled_from(list(self.rows))), self.pool.available
                left = promise._pages or 0
                tokens = data.draw(st.integers(0, 12))
                more = row.missing(row.length + tokens)
                try:
                    with promise.drawn_on():
                        self.write(row, tokens)
                except OutOfPagesError:
                    assert more > left + available
                    more = 0
                assert self.pool.available == available - max(0, more - left)
                with promise.drawn_on():
                    fork = row.fork()
                    fork.free()
                    if data.draw(st.booleans()):
                        row.free()
                        self.rows[row] = []
                assert self.pool.available == available - max(0, more - left)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), ahead=st.integers(0, 4))
    def list_pages(self, data: st.DataObject, ahead: int) -> None:
        """As far as pages are promised, the device knows some before the row enters them; nobody has fewer for it."""
        row = data.draw(st.sampled_from(list(self.rows)))
        available, promised, had = self.pool.available, row.limit, len(row.ahead)
        spare = promised // self.size - len(row.pages)
        first, new = row.list_pages(ahead)
        self.slots[row] = self.slots.get(row, [])[:first] + new
        assert self.slots[row] == row.pages + row.ahead
        assert len(row.ahead) == max(had, min(ahead, spare))
        assert (self.pool.available, row.limit) == (available, promised)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(list(self.rows)))
        row.position = row.length + 7
        length = data.draw(st.integers(0, row.length))
        del self.rows[row][length:]
        for _ in range(2):  # the second time there is nothing to do
            row.rewind(length)
            assert (row.length, row.position) == (length, length + 7)
        row.position = row.length

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(list(self.rows)))
        del self.rows[row]
        row.free()
        after = self.snapshot()
        assert (row.length, row.position, row.pages, row.ahead, row.limit) == (0, 0, [], [], 0)
        row.free()
        assert self.snapshot() == after

    @invariant()
    def the_account_adds_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        account = self.pool.account()
        assert account.used + account.free + account.cached == account.total
        assert account.used == len({page for row in self.rows for page in row.pages + row.ahead})
        promised = sum(row.limit // self.size - len(row.pages) - len(row.ahead) for row in self.rows)
        assert self.pool.available == account.free - promised >= 0

    @invariant()
    def each_page_has_its_owners_and_the_null_page_none(self) -> None:
        if not hasattr(self, "pool"):
            return
        owned = [page for row in self.rows for page in row.pages + row.ahead]
        assert self.pool._owners == [owned.count(page) for page in range(self.pool.total + 1)]
        assert set(owned) <= set(range(1, self.pool.total + 1)) - {NULL_PAGE}
        assert set(owned).isdisjoint(self.pool._free)

    @invariant()
    def each_row_has_the_pages_its_tokens_take(self) -> None:
        for row in getattr(self, "rows", ()):
            assert len(row.pages) == pages_needed(row.length, self.size)

    @invariant()
    def a_device_knows_the_pages_that_are_listed(self) -> None:
        for row, numbers in getattr(self, "slots", {}).items():
            assert numbers[: row.listed] == (row.pages + row.ahead)[: row.listed]

    @invariant()
    def each_row_reads_what_it_wrote(self) -> None:
        for row, text in getattr(self, "rows", {}).items():
            slots = [divmod(token, self.size) for token in range(row.length)]
            assert [self.memory[row.pages[page]][slot] for page, slot in slots] == text


TestPages = Pages.TestCase
TestPages.settings = settings(deterministic, max_examples=40, stateful_step_count=40)


@pytest.mark.parametrize("tokens", [-1, -40])
def test_a_negative_promise_is_refused(tokens):
    pool = PagePool(11, 4)
    with pytest.raises(ValueError, match=str(tokens)):
        Row(pool, tokens)
    assert pool.available == 10


@pytest.mark.parametrize("act", [lambda row: row.shrink(6), lambda row: row.rewind(6), lambda row: row.rewind(-1)])
def test_a_row_cannot_forget_what_it_does_not_hold(act):
    pool = PagePool(11, 4)
    row = Row(pool, 12)
    row.grow(5)
    with pytest.raises(ValueError, match=r"5|6|-1"):
        act(row)
    assert (row.length, len(row.pages)) == (5, 2)


# ---- the page table against one built token by token


def naive_table(rows: list[tuple[list[int], int]], queries: list[int], page_size: int) -> dict[str, list[int]]:
    table: dict[str, list[int]] = {"qo_indptr": [0], "indptr": [0], "indices": [], "last_page_len": []}
    for (pages, length), count in zip(rows, queries, strict=True):
        slots = [(pages[token // page_size], token % page_size) for token in range(length)]
        own = [page for index, (page, _) in enumerate(slots) if index % page_size == 0]
        table["indices"] += own
        table["indptr"].append(table["indptr"][-1] + len(own))
        table["qo_indptr"].append(table["qo_indptr"][-1] + count)
        table["last_page_len"].append(slots[-1][1] + 1)
    return table


@deterministic
@given(
    page_size=st.integers(1, 7),
    lengths=st.lists(st.integers(1, 40), max_size=6),
    null=st.integers(0, 3),
    data=st.data(),
)
def test_build_table_equals_a_naive_one(page_size, lengths, null, data):
    pool = PagePool(1000, page_size)
    rows = [Row(pool, 0) for _ in lengths]
    for length in range(max(lengths, default=0)):  # page by page in turn, so that rows interleave
        for row, whole in zip(rows, lengths, strict=True):
            if length < whole:
                row.grow(1)
    queries = [data.draw(st.integers(1, length)) for length in lengths]
    table = build_table(rows, queries, page_size, len(rows) + null)
    expected = naive_table(
        [*((row.pages, row.length) for row in rows), *[([NULL_PAGE], 1)] * null], [*queries, *[1] * null], page_size
    )
    assert {name: column.tolist() for name, column in table._asdict().items()} == expected
    assert all(column.dtype == np.int32 for column in table)


def test_a_table_of_padding_alone_reads_and_writes_the_null_page():
    table = build_table([], [], 4, 3)
    assert table.indices.tolist() == [NULL_PAGE] * 3
    assert table.last_page_len.tolist() == [1] * 3
    assert table.qo_indptr.tolist() == table.indptr.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("length", "pages"), [(1, 1), (4, 1), (5, 2), (9, 3)])
def test_a_null_row_lies_on_the_null_page(length, pages):
    assert Span.null(length, 4).pages == [NULL_PAGE] * pages


# ---- buckets


def test_buckets_are_one_two_four_eight_every_eight_and_above_64_every_sixteen():
    assert buckets_up_to(100) == [*buckets_up_to(64), 80, 96, 100]
    assert len(buckets_up_to(256)) <= 24
    assert buckets_up_to(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert buckets_up_to(1) == [1]
    assert buckets_up_to(9) == [1, 2, 4, 8, 9]


@pytest.mark.parametrize("most", range(1, 70))
def test_every_batch_has_the_smallest_bucket_that_holds_it(most):
    buckets = buckets_up_to(most)
    assert buckets[-1] == most
    assert all(small < large for small, large in pairwise(buckets))
    for rows in range(1, most + 1):
        bucket = bucket_for(rows, most)
        assert bucket in buckets
        assert bucket >= rows
        assert not [other for other in buckets if rows <= other < bucket]


# ---- memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_zeros_and_no_views(dtype):
    """Dynamo would trace what they are views of as well, layer by layer."""
    layer = Layer(query_heads=4, kv_heads=2, head_dim=16, window_left=-1, logits_soft_cap=0.0)
    for pages in allocate_pages(3, [layer, layer], 4, dtype, torch.device("cpu")):
        assert torch.equal(pages, torch.zeros(3, 2, 2, 4, 16, dtype=dtype))
        assert pages.is_contiguous()
        assert not pages._is_view()
