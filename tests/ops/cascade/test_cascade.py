"""Cascade attention on the CPU against each row's own attention, and the tables that say who shares what."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from compiled_llm_ops import CascadeTables, SharedRun, cascade_attention, cascade_attention_lse, cascade_tables
from support.ops.cascade_rows import CascadeRows, turned
from support.ops.fp8_pages import KINDS, fp8_cascade, fp8_written, scales_of, stored
from support.ops.op_cases import preparation

pytestmark = pytest.mark.core

TREE = [([0, 1, 2, 3, 5], 9), ([1, 2, 5], 4), ([2, 5], 1)]
TAILS = [1, 16, 70, 17, 33, 2]


def check(rows: CascadeRows, window_left: int = -1, soft_cap: float = 0.0, tables: CascadeTables | None = None) -> None:
    """The op against each row alone, and what it writes."""
    expected, expected_lse = rows.expected(window_left, soft_cap)
    given = rows.arguments(tables)
    out, lse = cascade_attention_lse(*given, window_left, soft_cap)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given[3], rows.written(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(cascade_attention(*given, window_left, soft_cap), out)
    assert out.is_contiguous()
    assert lse.is_contiguous()


# ---- the op


@pytest.mark.parametrize("group", [1, 2, 4, 7], ids="group={}".format)
def test_groups_of_heads_in_trees_of_runs(group, seed):
    check(CascadeRows(TREE, TAILS, group=group, page_size=16, seed=seed))


@pytest.mark.parametrize("sizes", [{"head_dim": 64}, {"head_dim": 128}, {"head_dim": 256}, {"padded": 32}], ids=str)
def test_heads_of_any_size(sizes, seed):
    check(CascadeRows(TREE, TAILS, page_size=16, seed=seed, **sizes))


@pytest.mark.parametrize("count", [2, 3, 33, 256], ids="rows={}".format)
def test_runs_of_any_number_of_rows(count, seed):
    tails = [1 + row % 9 for row in range(count + 1)]
    check(CascadeRows([(range(count), 9), (range(1, count, 2), 2)][: 1 + (count > 3)], tails, seed=seed))


@pytest.mark.parametrize("runs", [[], [([0, 3], 1)], [([4, 2], 3), ([1, 3, 5], 8)]], ids=str)
def test_rows_may_be_in_no_run(runs, seed):
    check(CascadeRows(runs, TAILS, seed=seed))


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("window_left", [0, 3, 15, 16, 40, 100, 10_000], ids="window={}".format)
def test_windows_begin_before_inside_and_after_a_run(window_left, soft_cap, seed):
    rows = CascadeRows([([0, 1, 2], 9), ([1, 2], 5)], [40, 3, 16], seed=seed)
    begins = {
        max(0, length - 1 - window_left) >= shared for length, shared in zip(rows.lengths, rows.shared, strict=True)
    }
    assert begins == {window_left <= 2} or window_left in (3, 15, 16)
    check(rows, window_left, soft_cap)


def test_nothing_outside_of_the_windows_is_read(seed):
    """Pages before them may be free, and belong to others."""
    rows = CascadeRows([([0, 1, 2], 12), ([1, 2], 5)], [7, 3, 20], seed=seed)
    rows.forget_before(rows.lengths[0] - 1 - 30)
    check(rows, 30)


def test_queries_and_keys_are_normed_and_turned_first(seed):
    rows = CascadeRows(TREE, TAILS, seed=seed)
    query_norm, key_norm, epsilon, cos, sin = own = preparation(rows.query)
    query, key = turned(rows.query, query_norm, epsilon, cos, sin), turned(rows.key, key_norm, epsilon, cos, sin)
    expected, expected_lse = rows.expected(query=query, key=key)
    given = rows.arguments()
    out, lse = cascade_attention_lse(*given, -1, 0.0, *own)
    torch.testing.assert_close((out, lse), (expected, expected_lse), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given[3], rows.written(key), equal_nan=True)


def test_values_may_have_another_size_than_keys(seed):
    rows = CascadeRows(TREE, TAILS, seed=seed)
    query, key, value, pages, *others = rows.arguments()
    uneven = torch.cat([pages[:, 0], pages[:, 1, ..., :5]], -1)
    out, lse = cascade_attention_lse(query, key, value[..., :5], uneven, *others)
    expected, expected_lse = rows.expected()
    torch.testing.assert_close((out, lse), (expected[..., :5], expected_lse), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window_left", "soft_cap"), [(-1, 0.0), (40, 1.5)])
def test_shared_pages_may_be_of_fp8(window_left, soft_cap, kind, seed):
    rows = CascadeRows(TREE, TAILS, group=3, seed=seed)
    scales = scales_of(kind, 2)
    rows, read = fp8_cascade(rows, scales)
    given, fp8 = rows.arguments(), scales.given
    out, lse = cascade_attention_lse(*given, window_left, soft_cap, **fp8)
    torch.testing.assert_close((out, lse), read.expected(window_left, soft_cap), rtol=1e-4, atol=1e-4)
    assert torch.equal(given[3].view(torch.uint8), fp8_written(rows, scales))
    newest = zip((rows.key, rows.value), scales, strict=True)
    clamped = sum(stored(states, scale).clamped for states, scale in newest)
    assert fp8["saturated"].tolist() == [clamped]
    assert (clamped > 0) == (kind == "small")
    assert torch.equal(cascade_attention(*given, window_left, soft_cap, **fp8), out)


@pytest.mark.parametrize("kind", ["none", "both"])
def test_queries_and_keys_are_normed_and_turned_before_they_are_rounded_to_fp8(kind, seed):
    rows, scales = CascadeRows(TREE, TAILS, seed=seed), scales_of(kind, 2)
    query_norm, key_norm, epsilon, cos, sin = own = preparation(rows.query)
    query, key = turned(rows.query, query_norm, epsilon, cos, sin), turned(rows.key, key_norm, epsilon, cos, sin)
    rows, read = fp8_cascade(rows, scales)
    expected = read.expected(query=query, key=stored(key, scales.key).read)
    out, lse = cascade_attention_lse(*rows.arguments(), -1, 0.0, *own, **scales.given)
    torch.testing.assert_close((out, lse), expected, rtol=1e-4, atol=1e-4)


def random_runs(rng: random.Random, rows: int, most_pages: int) -> list[tuple[list[int], int]]:
    """A forest of runs: rows are cut into groups, of which some share pages, and these into groups again."""
    runs: list[tuple[list[int], int]] = []
    groups = [rng.sample(range(rows), rows)]
    for _ in range(3):
        cut = []
        for group in groups:
            while group:
                size = rng.randint(1, len(group))
                cut.append(group[:size])
                group = group[size:]
        groups = [group for group in cut if len(group) > 1 and rng.random() < 0.8]
        runs += [(group, rng.randint(1, most_pages)) for group in groups]
    return runs


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 12),
    page_size=st.sampled_from([1, 3, 16, 200]),
    group=st.sampled_from([1, 2, 3]),
    window_left=st.one_of(st.just(-1), st.integers(0, 60)),
    limits=st.tuples(st.integers(1, 40), st.integers(0, 30), st.integers(0, 60)),
    seed=st.integers(0, 2**31),
)
def test_any_grouping_gives_what_rows_give_alone(rows, page_size, group, window_left, limits, seed):
    """A failure prints the seed, as all that the case is made of."""
    rng = random.Random(seed)
    processors, max_items, max_parts = limits
    runs = random_runs(rng, rows, 400 // page_size if page_size < 200 else 3)
    batch = CascadeRows(
        runs, [rng.randint(1, 40) for _ in range(rows)], page_size=page_size, group=group, seed=seed,
        processors=processors, max_items=max_items, max_parts=max_parts,
    )  # fmt: skip
    rng.shuffle(batch.runs)
    check_tables(batch, batch.tables())
    check(batch, window_left)


def test_a_function_of_the_op_compiles_whole_and_once_for_all_sizes(seed):
    def step(*given: Any) -> Tensor:
        out, lse = cascade_attention_lse(given[0] * 2, *given[1:])
        return (out + lse[..., None]).relu() + cascade_attention(*given)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    batches = [(TREE, [*TAILS, 3], 17), ([([0, 2], 3)], [4, 1, 9], 33), ([], [3, 8], 5)]
    for number, (runs, tails, max_items) in enumerate(batches):  # no two sizes are equal by chance
        rows = CascadeRows(runs, tails, head_dim=16, seed=seed, max_items=max_items)
        results = []
        for function in (compiled, step):
            with torch.compiler.set_stance("fail_on_recompile" if number and function is compiled else "default"):
                results.append(function(*rows.arguments()))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("table", "at", "change"),
    [
        ("work_items", (0, 0), 1),
        ("work_items", (0, 2), -4),
        ("work_items", (0, 5), 1),
        ("members", (0,), 3),
        ("merge_parts", (1, 0, 1), -1),
        ("merge_parts", (1, 0, 0), 1),
        ("shared_lengths", (1,), -4),
    ],
    ids=str,
)
def test_wrong_tables_give_wrong_results(table, at, change, seed):
    """Or tests with this kernel could not tell."""
    rows = CascadeRows(TREE, TAILS, seed=seed)
    tables = rows.tables()
    check(rows, tables=tables)
    getattr(tables, table)[at] += change
    out = cascade_attention(*rows.arguments(tables))
    assert not torch.allclose(out, rows.expected()[0], rtol=1e-3, atol=1e-3)


WRONG: list[tuple[dict[str, Callable[[Any], Any]], str]] = [
    (dict.fromkeys(("starts", "lengths"), lambda own: own[:3]), r"exactly one new token; got 6 tokens for 3 rows"),
    ({"query": lambda query: query[:, :3]}, r"cascade_attention: 3 query heads.*2 kv heads"),
    ({"key": lambda key: key[:-1]}, r"cascade_attention: key and value must be \(6, 2, 8\)"),
    ({"shared_lengths": lambda lengths: lengths[:5]}, r"shared_lengths must be \(6,\) for 6 rows; got \(5,\)"),
    ({"members": lambda members: members[None]}, r"members must be \(18,\).*got \(1, 18\)"),
    ({"work_items": lambda items: items[:, :5]}, r"work_items must be \(32, 6\).*got \(32, 5\)"),
    ({"merge_parts": lambda parts: parts[:, :2]}, r"merge_parts must be \(6, 3, 3\).*got \(6, 2, 3\)"),
    ({"merge_parts": lambda parts: parts.long()}, r"cascade_attention: merge_parts must be int32; got torch.int64"),
    ({"shared_lengths": lambda lengths: lengths.float()}, r"shared_lengths must be int32"),
    ({"max_parts": lambda parts: -1}, r"max_parts=-1 must not be negative"),
    ({"query": lambda query: query.repeat(1, 40, 1)}, r"at most 64 query heads; got 80"),
    ({"cos": lambda _: torch.ones(6, 8)}, r"cascade_attention: cos and sin must be given together"),
    ({"key_scale": lambda _: torch.ones(2)}, r"cascade_attention: key_scale must be None for pages of torch.float32"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_is_refused_before_anything_is_written(changes, message, seed):
    from compiled_llm_ops.attention.cascade.contract import CascadeAttention

    args = CascadeAttention(*CascadeRows(TREE, TAILS, seed=seed).arguments())
    pages = args.pages.clone()
    for op in (cascade_attention, cascade_attention_lse):
        with pytest.raises(ValueError, match=message):
            op(*args._replace(**{name: change(getattr(args, name)) for name, change in changes.items()}))
    torch.testing.assert_close(args.pages, pages, rtol=0, atol=0, equal_nan=True)


# ---- the tables


def check_tables(rows: CascadeRows, tables: CascadeTables) -> None:
    """Each row's parts are its shared keys, each key once, from its own pages; nothing is past the limits."""
    assert all(column.dtype == np.int32 for column in tables)
    assert tables.work_items.shape == (rows.max_items, 6)
    used = int((tables.work_items[:, 4] > 0).sum())
    assert not tables.work_items[used:].any()
    size, tile = rows.page_size, 64 // (1 << (rows.group - 1).bit_length())
    wrote: dict[int, tuple[int, int, int]] = {}
    for first_page, position, keys, first, count, part in tables.work_items[:used].tolist():
        assert 0 < count <= tile
        assert keys > 0
        assert keys % size == position % size == 0
        numbers = rows.indices[first_page : first_page + keys // size].tolist()
        for at, row in enumerate(tables.members[first : first + count].tolist()):
            assert numbers == rows.own[row][position // size : (position + keys) // size]
            assert part + at not in wrote
            wrote[part + at] = row, position, keys
    assert set(wrote) == set(range(len(wrote)))
    assert len(wrote) <= rows.max_parts
    for row, levels in enumerate(tables.merge_parts.tolist()):
        parts = [wrote.pop(first + step * at) for first, count, step in levels for at in range(count)]
        assert all(owner == row for owner, _, _ in parts)
        ends = sorted((position, position + keys) for _, position, keys in parts)
        assert [begin for begin, _ in ends] == [0, *(end for _, end in ends)][: len(ends)]
        assert tables.shared_lengths[row] == (ends[-1][1] if ends else 0) <= rows.shared[row]
    assert not wrote


def read_by_item(tables: CascadeTables) -> Counter[int]:
    """How often each entry of `indices` is read, with pages of 16."""
    return Counter(
        entry
        for first_page, _, keys, _, count, _ in tables.work_items.tolist()
        if count
        for entry in range(first_page, first_page + keys // 16)
    )


def test_pages_of_a_run_are_read_once_for_all_rows_of_a_tile():
    """Of 32 rows, with two query heads of a kv head; that is once if there are no more."""
    starts = list(range(0, 600 * 256, 600))
    for count, times in ((2, 1), (32, 1), (33, 2), (256, 8)):
        tables = cascade_tables([SharedRun(tuple(range(count)), 0, 500)], starts, 16, 16, 8, 132, 512, 4096)
        assert read_by_item(tables) == dict.fromkeys(range(500), times)


def test_runs_are_left_out_until_the_rest_fits(seed):
    """Those that save little first, and no run before one that stands on it."""
    runs = [([0, 1, 2, 3], 2), ([0, 1], 8), ([2, 3], 9), ([4, 5, 6], 4), ([7, 8], 5)]
    rows = CascadeRows(runs, [3] * 10, seed=seed)
    for max_items, kept in ((5, {0, 1, 2, 3, 4}), (4, {0, 1, 2, 3}), (3, {0, 2, 3}), (2, {0, 2}), (1, {0}), (0, set())):
        rows.max_items = max_items
        tables = rows.tables()
        check_tables(rows, tables)
        found = {
            number for number, run in enumerate(rows.runs)
            if all(tables.shared_lengths[row] >= (run.first_page + run.pages) * 4 for row in run.rows)
        }  # fmt: skip
        assert found == kept
    rows.max_items = 32
    for max_parts in range(20):
        rows.max_parts = max_parts
        check_tables(rows, rows.tables())
        check(rows)


@pytest.mark.parametrize(
    "runs",
    [
        [(range(256), 128)],
        [(range(2), 1000)],
        [(range(start, start + 51), 40 + start) for start in range(0, 255, 51)],
        [(range(256), 10), *((range(start, start + 64), 40 + start) for start in range(0, 256, 64))],
        [(range(row, row + 2), 60 + row % 13) for row in range(0, 256, 2)],
        [(range(4), 8), (range(4, 8), 600)],
    ],
    ids=lambda runs: f"{len(runs)} runs",
)
def test_programs_have_about_equally_much_to_read(runs):
    ends = [0] * 256
    shared = []
    for members, pages in runs:
        shared.append(SharedRun(tuple(members), ends[members[0]], pages))
        for row in members:
            ends[row] += pages
    tables = cascade_tables(shared, list(range(0, 10_000 * 256, 10_000)), 16, 16, 8, 132, 512, 8192)
    programs = 132 // 8
    keys = tables.work_items[:, 2]
    busy = [int(keys[program::programs].sum()) for program in range(programs)]
    assert max(busy) <= sum(busy) / programs * 1.35 + 128


def test_pieces_are_multiples_of_pages_and_preferably_of_128_keys():
    for page_size, pages, multiple in ((16, 100, 128), (1, 1000, 128), (64, 30, 128), (5, 300, 125), (256, 9, 256)):
        tables = cascade_tables([SharedRun((0, 1), 0, pages)], [0, 5000], page_size, 16, 8, 132, 512, 4096)
        keys = sorted(tables.work_items[tables.work_items[:, 4] > 0, 2].tolist())
        assert len(keys) > 4
        assert sum(count % multiple != 0 for count in keys) <= 1
        assert all(count % page_size == 0 for count in keys)
        assert sum(keys) == pages * page_size


REFUSED: list[tuple[Sequence[tuple[tuple[int, ...], int, int]], str]] = [
    ([((0, 1), 1, 2)], "runs of row 0 must follow one another from page 0"),
    ([((0, 1), 0, 2), ((1, 2), 2, 3)], "runs of row 2 must follow one another"),
    ([((0, 1), 0, 2), ((0, 1), 3, 3)], "runs of row 0 must follow one another"),
    ([((0, 1), 0, 2), ((1, 2), 0, 2)], "runs of row 1 must follow one another"),
    ([((0, 1), 0, 4), ((0, 1), 2, 2)], "runs of row 0 must follow one another"),
    ([((0, 1, 0), 0, 2)], "row 0 must follow one another from page 0, each with the row once"),
    ([((0, 1), -1, 2)], "runs of row 0 must follow one another"),
    ([((2,), 0, 2)], r"at least two of the 4 rows; got SharedRun\(rows=\(2,\)"),
    ([((), 0, 2)], "at least two of the 4 rows"),
    ([((0, 4), 0, 2)], "at least two of the 4 rows"),
    ([((0, -1), 0, 2)], "at least two of the 4 rows"),
    ([((0, 1), 0, 0)], "must have a page"),
    ([((0, 3), at, 1) for at in range(4)], "in at most 3 shared runs; row 0 is in more"),
    ([((0, 3), at, 1) for at in range(7)], "in at most 3 shared runs; row 0 is in more"),
]


@pytest.mark.parametrize(("runs", "message"), REFUSED, ids=str)
def test_runs_that_are_none_are_refused(runs, message):
    with pytest.raises(ValueError, match=message):
        cascade_tables([SharedRun(*run) for run in runs], [0, 10, 20, 30], 16, 4, 2, 132, 512, 4096)


def test_too_many_query_heads_of_a_kv_head_are_refused():
    with pytest.raises(ValueError, match="at most 64 query heads; got 65"):
        cascade_tables([], [0, 10], 16, 65, 1, 132, 512, 4096)
