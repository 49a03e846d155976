"""Cascade attention by two plans, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_llm_ops import (
    SharedRun,
    plan_paged_attention,
    planned_cascade_attention,
    planned_cascade_attention_lse,
    planned_cascade_tables,
)
from compiled_llm_ops.contracts import CASCADE_RUNS, planned_members
from support.ops.cascade_rows import CascadeRows
from support.ops.fp8_pages import KINDS, fp8_cascade, fp8_written, scales_of

TREE = [([0, 1, 2, 3, 5], 9), ([1, 2, 5], 4), ([2, 5], 1)]
TAILS = [1, 16, 70, 17, 33, 2]


def check(rows: CascadeRows, soft_cap: float = 0.0, shared: list[SharedRun] | None = None) -> None:
    """The op against each row alone."""
    args = rows.planned_arguments(shared)._replace(logits_soft_cap=soft_cap)
    out, lse = planned_cascade_attention_lse(*args)
    torch.testing.assert_close((out, lse), rows.expected(soft_cap=soft_cap), rtol=1e-4, atol=1e-5)
    assert torch.equal(planned_cascade_attention(*args), out)
    assert out.is_contiguous()
    assert lse.is_contiguous()


# ---- the op


@pytest.mark.parametrize("group", [1, 2, 7], ids="group={}".format)
@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
def test_groups_of_heads_in_trees_of_runs(group: int, soft_cap: float, seed: int) -> None:
    check(CascadeRows(TREE, TAILS, group=group, page_size=16, padded=16, seed=seed), soft_cap)


@pytest.mark.parametrize("runs", [[], [([0, 3], 1)], [([4, 2], 3), ([1, 3, 5], 8)]], ids=str)
def test_rows_may_be_in_no_run(runs: Any, seed: int) -> None:
    check(CascadeRows(runs, TAILS, seed=seed))


@pytest.mark.parametrize("count", [2, 33, 256], ids="rows={}".format)
def test_runs_of_any_number_of_rows(count: int, seed: int) -> None:
    tails = [1 + row % 9 for row in range(count + 1)]
    check(CascadeRows([(range(count), 9), (range(1, count, 2), 2)][: 1 + (count > 3)], tails, seed=seed))


def test_rows_whose_runs_have_no_room_read_them_alone(seed: int) -> None:
    pairs = [((row, row + 1), 1 + row % 3) for row in range(0, 90, 2)]
    check(CascadeRows(pairs, [1 + row % 7 for row in range(90)], seed=seed))


def test_values_may_have_another_size_than_keys(seed: int) -> None:
    rows = CascadeRows(TREE, TAILS, seed=seed)
    args = rows.planned_arguments()
    uneven = torch.cat([args.pages[:, 0], args.pages[:, 1, ..., :5]], -1)
    out, lse = planned_cascade_attention_lse(*args._replace(pages=uneven))
    expected, expected_lse = rows.expected()
    torch.testing.assert_close((out, lse), (expected[..., :5], expected_lse), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_pages_may_be_of_fp8(kind: str, seed: int) -> None:
    scales = scales_of(kind, 2)
    rows, read = fp8_cascade(CascadeRows(TREE, TAILS, group=3, seed=seed), scales)
    args = rows.planned_arguments()._replace(
        pages=fp8_written(rows, scales).view(torch.float8_e4m3fn),
        **{name: scales.given[name] for name in ("key_scale", "value_scale")},
    )
    torch.testing.assert_close(planned_cascade_attention_lse(*args), read.expected(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(4, 4, 8)}, "exactly one new token; got 4 tokens for 2 rows"),
        ({"merge_parts": torch.zeros(2, 2, 3, dtype=torch.int32)}, r"merge_parts must be \(2, 3, 3\) for 2 rows"),
        ({"run_indptr": torch.zeros(2, dtype=torch.int32)}, r"run_indptr must be \(33,\) for 2 rows and 32 runs"),
        ({"members": torch.zeros(38)}, "members must be int32"),
    ],
)
def test_wrong_arguments_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned_cascade_attention(*CascadeRows([([0, 1], 2)], [3, 5]).planned_arguments()._replace(**change))


# ---- its tables


def test_runs_that_save_the_fewest_keys_are_left_out() -> None:
    pairs = [SharedRun((row, row + 1), 0, 1 + row) for row in range(0, 80, 2)]
    tables = planned_cascade_tables([*pairs, SharedRun((78, 79), 79, 1)], 80)
    assert tables.runs == tuple(pairs[-CASCADE_RUNS + 1 :])
    assert tables.shared_pages.tolist() == [0] * 18 + [1 + row // 2 * 2 for row in range(18, 80)]


def test_members_in_no_run_are_those_of_one_more() -> None:
    tables = planned_cascade_tables([SharedRun((0, 2, 3), 0, 4), SharedRun((2, 3), 4, 2)], 5)
    assert len(tables.members) == planned_members(5)
    assert tables.queries.tolist() == [3, 2, planned_members(5) - 5, *[0] * (CASCADE_RUNS - 3)]
    assert tables.members[:5].tolist() == [0, 2, 3, 2, 3]
    assert tables.merge_parts[2].tolist() == [[1, 1, 1], [3, 1, 1], [0, 0, 0]]
    assert not tables.merge_parts[[1, 4]].any()
    nothing = planned_cascade_tables([], 5)
    assert nothing.runs == ()
    assert not nothing.merge_parts.any()
    assert nothing.queries.tolist() == [planned_members(5), *[0] * (CASCADE_RUNS - 1)]


def test_there_are_never_fewer_members_than_runs() -> None:
    """FlashInfer's planner subtracts one number from the other, without a sign."""
    assert all(planned_members(rows) > CASCADE_RUNS for rows in range(1, 300))


# ---- plans


def test_a_plan_for_latents_is_causal() -> None:
    columns = [torch.tensor(column, dtype=torch.int32) for column in ([0, 1], [0, 1], [1])]
    unread = torch.zeros(16, dtype=torch.uint8)
    geometry = (16, 1, 512, 16, -1, 0.0, torch.bfloat16, torch.bfloat16, 64)
    with pytest.raises(ValueError, match="causal=False: plans for latents are causal"):
        plan_paged_attention(unread, unread.view(torch.int64), *columns, unread.clone(), *geometry, causal=False)
