"""The ops of block-sparse attention on the CPU, against dense attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from compiled_llm_flashinfer.ops import (
    block_sparse_attention,
    block_sparse_attention_lse,
    block_sparse_items,
    variable_block_sparse_attention,
    variable_block_sparse_attention_lse,
    variable_block_sparse_tables,
)
from compiled_llm_flashinfer.ops.contracts import SparseItem
from support.flashinfer_api.sparse_blocks import BLOCKS, Sizes, SparseBlocks, VariableBlocks

pytestmark = pytest.mark.core

Any_ = SparseBlocks | VariableBlocks
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def check(blocks: Any_, out: Tensor, with_lse: Tensor, lse: Tensor, soft_cap: float = 0.0) -> None:
    expected, expected_lse = blocks.expected(soft_cap)
    assert out.is_contiguous()
    assert torch.equal(out, with_lse)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(lse, expected_lse, **CLOSE)


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks_equal_a_dense_mask(block, masked, soft_cap, seed):
    sizes = Sizes(block[0] * 5, block[1] * 7)
    blocks = SparseBlocks(block, sizes, masked=masked, spare=3, seed=seed)
    args = blocks.arguments(soft_cap)
    check(blocks, block_sparse_attention(*args), *block_sparse_attention_lse(*args), soft_cap)


@pytest.mark.parametrize("soft_cap", [0.0, 1.5])
@pytest.mark.parametrize("count", [(1, 1), (3, 5), (10, 20), (40, 4)], ids=str)
def test_blocks_of_any_sizes_equal_a_dense_mask(count, soft_cap, seed):
    blocks = VariableBlocks(count, Sizes(61, 130), seed=seed)
    args = blocks.arguments(soft_cap)
    outs = variable_block_sparse_attention(*args), *variable_block_sparse_attention_lse(*args)
    check(blocks, *outs, soft_cap)


# ---- the tables


def checked_items(items: Tensor, queries: int, kv_heads: int, entries: int, max_parts: int) -> list[SparseItem]:
    """The items that are used, of which each query of a head has one of each part, and each entry is read once."""
    used = [SparseItem(*row) for row in items.tolist() if row[2]]
    assert all(not any(row) for row in items.tolist() if not row[2])
    seen = torch.zeros(kv_heads, queries)
    parts = torch.zeros(max_parts, dtype=torch.int64)
    for item in used:
        rows = slice(item.first_query, item.first_query + item.queries)
        seen[item.kv_head, rows] += 1 / item.parts
        assert 0 <= item.part < item.parts
        assert item.first_piece + item.pieces <= entries
        if item.parts > 1:
            parts[item.first_part + item.part] += 1
    torch.testing.assert_close(seen, torch.ones_like(seen))
    assert not (parts > 1).any()
    return used


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 60),
    block=st.tuples(st.integers(1, 200), st.sampled_from([1, 5, 16, 128])),
    density=st.floats(0, 1),
    processors=st.sampled_from([1, 20, 132]),
    max_parts=st.sampled_from([0, 3, 500]),
    seed=st.integers(0, 1000),
)
def test_each_query_and_each_block_is_dealt_once(rows, columns, block, density, processors, max_parts, seed):
    matrix = np.random.default_rng(seed).random((rows, columns)) < density
    indptr = np.concatenate([[0], matrix.sum(1).cumsum()])
    indices = matrix.nonzero()[1]
    sizes = (rows * block[0], columns * block[1], *block, 8, 2, 128)
    items = torch.from_numpy(block_sparse_items(indptr, indices, *sizes, processors, 2000 + max_parts, max_parts))
    used = checked_items(items, sizes[0], 1, len(indices), max_parts)
    lengths = [item.pieces for item in used]
    assert lengths == sorted(lengths, reverse=True), "the longest begin first"
    for row in range(rows):
        own = [item for item in used if item.first_query == row * block[0]]
        read = [at for item in own for at in range(item.first_piece, item.first_piece + item.pieces)]
        assert sorted(read) == list(range(indptr[row], indptr[row + 1]))


def test_a_long_row_is_shared_by_many_programs_and_many_rows_are_not():
    def items_of(rows: int, columns: int) -> Tensor:
        indptr = np.arange(rows + 1) * columns
        indices = np.tile(np.arange(columns), rows)
        return torch.from_numpy(
            block_sparse_items(indptr, indices, rows * 16, columns * 64, 16, 64, 8, 8, 128, 132, 2000, 64)
        )

    assert int((items_of(1, 1000)[:, 2] > 0).sum()) == 63, "shares of 16 blocks for up to 528 programs and 8 heads"
    assert int((items_of(100, 100)[:, 2] > 0).sum()) == 100


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    blocks=st.tuples(st.integers(1, 9), st.integers(1, 30)),
    sizes=st.tuples(st.integers(1, 300), st.integers(1, 500)),
    density=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_pieces_are_the_keys_that_each_row_sees(blocks, sizes, density, seed):
    made = VariableBlocks(blocks, Sizes(*sizes), density=density, processors=132, seed=seed)
    items, pieces = made.tables
    used = checked_items(items, sizes[0], 2, len(pieces), made.max_parts)
    starts = made.rows.cumsum(1) - made.rows
    for head in range(2):
        for row, size in enumerate(made.rows[head].tolist()):
            if not size:
                continue
            own = [item for item in used if item.kv_head == head and item.first_query == int(starts[head, row])]
            keys = [
                at
                for item in own
                for first, count in pieces[item.first_piece : item.first_piece + item.pieces].tolist()
                for at in range(first, first + count)
            ]
            assert sorted(keys) == made.map[head, row].repeat_interleave(made.columns[head]).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indptr": np.array([0, 3, 2, 5])}, r"indptr must be \[4\], from 0 up"),
        ({"indptr": np.array([0, 1, 2, 9])}, "no more than the 5 indices"),
        ({"indptr": np.array([0, 5])}, r"indptr must be \[4\]"),
        ({"indices": np.array([0, 1, 2, 3, 5])}, "columns of blocks, 0 to 4; got 0 to 5"),
        ({"indices": np.array([0, -1, 2, 3, 4])}, "got -1 to 4"),
        ({"max_items": 2}, "max_items=2 are too few for the 3 tiles"),
        ({"keys": 41}, "C=8 columns do not divide M=12 queries and N=41 keys"),
        ({"block_rows": 0}, "R=0 rows"),
    ],
)
def test_a_matrix_that_is_none_is_refused(change, message):
    given: dict[str, Any] = {
        "indptr": np.array([0, 2, 4, 5]), "indices": np.array([0, 1, 2, 3, 4]), "queries": 12, "keys": 40,
        "block_rows": 4, "block_columns": 8, "heads": 4, "kv_heads": 2, "head_dim": 64, "processors": 4, "max_items": 9,
        "max_parts": 2,
    }  # fmt: skip
    block_sparse_items(**given)
    with pytest.raises(ValueError, match=message):
        block_sparse_items(**{**given, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_row_sz": np.ones((2, 4), int)}, r"block_row_sz \[K, MB\]"),
        ({"block_col_sz": np.array([[2, 2], [2, 3]])}, r"block_col_sz must be sizes with one sum.*\[4, 5\]"),
        ({"block_row_sz": np.array([[4, 0, -1], [1, 1, 1]])}, "block_row_sz must be sizes"),
        ({"max_pieces": 3}, "max_pieces=3 are too few for the 6 pieces"),
        ({"max_items": 5}, "max_items=5 are too few for the 6 tiles"),
    ],
)
def test_sizes_that_do_not_fit_a_map_are_refused(change, message):
    given: dict[str, Any] = {
        "block_mask_map": np.ones((2, 3, 2), bool), "block_row_sz": np.ones((2, 3), int),
        "block_col_sz": np.full((2, 2), 2), "heads": 4, "head_dim": 64, "processors": 4, "max_items": 9, "max_parts": 2,
        "max_pieces": 20,
    }  # fmt: skip
    variable_block_sparse_tables(**given)
    with pytest.raises(ValueError, match=message):
        variable_block_sparse_tables(**{**given, **change})


# ---- what the ops refuse


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(20, 4, 8)}, r"query must be \[M, H, D\]"),
        ({"key": torch.zeros(80, 2, 16).half()}, "of its dtype"),
        ({"query": torch.zeros(20, 3, 16)}, "3 query heads are not as many for each of 2 kv heads"),
        ({"block_columns": 7}, "block_sparse_attention: blocks of R=4 rows and C=7 columns do not divide"),
        ({"indptr": torch.zeros(5, dtype=torch.int32)}, r"indptr must be \[6\] for 20 queries in blocks of 4"),
        ({"indices": torch.zeros(9)}, "indices must be int32"),
        ({"mask": torch.ones(3, 4, 16, dtype=torch.bool)}, r"mask must be \(\d+, 4, 16\) bool"),
        ({"work_items": torch.zeros(3, 7, dtype=torch.int32)}, r"work_items must be \[W, 8\].*\(3, 7\) and 64"),
        ({"max_parts": -1}, "max_parts not negative"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message, seed):
    args = SparseBlocks((4, 16), Sizes(20, 80), masked=True, seed=seed).arguments()
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(*args._replace(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_mask_map": torch.ones(1, 3, 5, dtype=torch.bool)}, r"block_mask_map must be \[2, MB, NB\] bool"),
        ({"block_row_sz": torch.ones(2, 3, dtype=torch.int32)}, r"block_row_sz must sum to 20.*\[3, 3\]"),
        ({"pieces": torch.zeros(3, dtype=torch.int32)}, r"pieces must be \[X, 2\]"),
        ({"block_col_sz": torch.ones(2, 5)}, "block_col_sz must be int32"),
    ],
)
def test_variable_arguments_that_do_not_fit_are_refused(change, message, seed):
    args = VariableBlocks((3, 5), Sizes(20, 80), seed=seed).arguments()
    with pytest.raises(ValueError, match=message):
        variable_block_sparse_attention(*args._replace(**change))


def test_compiled_whole_and_once_for_all_blocks(seed):
    def step(args: Any, others: Any) -> tuple[Tensor, ...]:
        out, lse = block_sparse_attention_lse(args[0] * 2, *args[1:])
        return out + 1, lse, variable_block_sparse_attention(others[0] + 1, *others[1:])

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    no_guards_on_equal_sizes = torch.fx.experimental._config.patch(use_duck_shape=False)
    with torch._dynamo.config.patch(error_on_recompile=True), no_guards_on_equal_sizes:
        for number, count in enumerate((5, 9)):
            blocks = SparseBlocks((4, 16), Sizes(4 * count, 16 * count + 32), masked=True, seed=seed + number)
            others = VariableBlocks((3 + number, 7), Sizes(30 + number, 70), seed=seed)
            given = tuple(blocks.arguments()), tuple(others.arguments())
            torch.testing.assert_close(compiled(*given), step(*given))
