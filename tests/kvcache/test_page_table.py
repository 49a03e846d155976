"""The page table says where pages are, and rows and buckets are what they say."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from compiled_llm.compilation.graphs.captured_shapes import bucket_for, buckets_up_to
from compiled_llm.kinds.full import FullAttentionSpec
from compiled_llm.kvcache.pool import NULL_PAGE, PagePool
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.specs import allocate_pages
from compiled_llm.kvcache.table import Span, build_table

pytestmark = pytest.mark.core

deterministic = settings(derandomize=True, deadline=None, max_examples=60)


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
    assert (row.exact_length, len(row.pages)) == (5, 2)


# ---- the page table against one built token by token


def naive_table(rows: list[tuple[list[int], int]], queries: list[int], page_size: int) -> dict[str, Any]:
    table: dict[str, Any] = {"qo_indptr": [0], "indptr": [0], "indices": [], "last_page_len": []}
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
        [*((row.pages, row.exact_length) for row in rows), *[([NULL_PAGE], 1)] * null],
        [*queries, *[1] * null],
        page_size,
    )
    assert {name: column.tolist() for name, column in table._asdict().items()} == expected
    assert all(column.dtype == np.int32 for column in table)


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
    spec = FullAttentionSpec(kv_heads=2, head_dim=12, stored_head_dim=16, page_size=4, dtype=dtype)
    for pages in allocate_pages([spec, spec], 3, ReleasableMemory(torch.device("cpu"))):
        assert torch.equal(pages, torch.zeros(3, 2, 2, 4, 16, dtype=dtype))
        assert pages.is_contiguous()
        assert not pages._is_view()
