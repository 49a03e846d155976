"""The block-sparse kernel: under Triton's interpreter on the CPU, and compiled for Hopper without a GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from compiled_llm_flashinfer.ops.contracts import SPARSE_PIECE
from compiled_llm_flashinfer.ops.kernels.sparse.block_sparse_tiling import (
    missing_kernel,
    most_programs,
    sparse_merge,
    sparse_tile,
)
from support.flashinfer_api.sparse_blocks import BLOCKS, Sizes, SparseBlocks, VariableBlocks
from support.ops.compiling import compiled, resources_of
from support.ops.interpreting import interpreted, needs_triton, not_interpreted

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]


def check(blocks: SparseBlocks | VariableBlocks, soft_cap: float = 0.0) -> None:
    """By programs that each take several work items, and by more."""
    from compiled_llm_flashinfer.ops.kernels.sparse.block_sparse import attend

    out, lse = attend("op", blocks.arguments(soft_cap), True, 1)
    expected, expected_lse = blocks.expected(soft_cap)
    torch.testing.assert_close(out.float(), expected, rtol=3e-3, atol=3e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=2e-3)
    assert torch.equal(attend("op", blocks.arguments(soft_cap), False, 132)[0], out)


def sizes_of(queries: int, keys: int, **more: Any) -> Sizes:
    return Sizes(queries, keys, **{"dtype": torch.float16, **more})


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks(block, masked, seed):
    sizes = sizes_of(block[0] * 4, block[1] * max(4, 400 // block[1]))
    check(SparseBlocks(block, sizes, masked=masked, spare=3, processors=1, seed=seed), soft_cap=1.5 * masked)


@pytest.mark.drawn(most=2)
@interpreted
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block", [(1, 16), (4, 1), (33, 128), (16, 64)], ids=str)
def test_rows_that_many_programs_share(block, masked, seed):
    sizes = sizes_of(block[0] * 3, block[1] * (6400 // block[1]))
    blocks = SparseBlocks(block, sizes, density=0.5, masked=masked, processors=60, seed=seed)
    assert int(blocks.items[:, -1].max()) > 2
    check(blocks)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (5, 1), (34, 2)])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_heads_of_any_number_and_size(heads, kv_heads, head_dim, seed):
    sizes = sizes_of(16, 1600, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    check(SparseBlocks((8, 16), sizes, density=0.6, processors=8, seed=seed))


@pytest.mark.drawn(most=2)
@interpreted
@pytest.mark.parametrize("count", [(1, 1), (3, 5), (10, 20), (40, 4)], ids=str)
@pytest.mark.parametrize("processors", [1, 60])
def test_blocks_of_any_sizes(count, processors, seed):
    check(VariableBlocks(count, sizes_of(60, 1300), processors=processors, seed=seed), soft_cap=1.5)
    check(VariableBlocks(count, sizes_of(7, 1300, heads=6), processors=processors, seed=seed))


@interpreted
def test_queries_that_see_nothing_but_the_rest_of_their_row_do(seed):
    """Also where several programs share the row."""
    blocks = SparseBlocks((4, 16), sizes_of(4, 3200), density=1.0, masked=True, processors=60, seed=seed)
    assert blocks.mask is not None
    blocks.mask[:, 1] = False
    blocks.mask[: len(blocks.mask) // 2, 2] = False
    check(blocks)


@interpreted
def test_states_may_have_any_strides(seed):
    blocks = VariableBlocks((3, 5), sizes_of(30, 70), seed=seed)
    blocks.states = [own.transpose(0, 1).contiguous().transpose(0, 1) for own in blocks.states]
    check(blocks)
    blocks.states = [own.transpose(0, 2).contiguous().transpose(0, 2) for own in blocks.states]
    check(blocks)


@interpreted
def test_counters_are_zero_again(seed, monkeypatch):
    from compiled_llm_flashinfer.ops.kernels.sparse import block_sparse

    counters = torch.zeros(4096, dtype=torch.int32)
    monkeypatch.setattr(block_sparse.zeroed_counters, "take", lambda count, device: counters[:count])
    for processors in (60, 8, 132):
        check(SparseBlocks((4, 16), sizes_of(12, 2400), density=0.5, processors=processors, seed=seed))
        assert not counters.any()


def test_what_has_no_kernel_is_named(seed):
    from compiled_llm_flashinfer.ops.kernels.sparse.block_sparse import attend

    for sizes, message in (
        (Sizes(4, 16), r"op: no kernel for torch\.float32; use torch\.bfloat16"),
        (sizes_of(4, 16, head_dim=300), "op: no kernel for heads of size 300; there are some up to 256"),
    ):
        with pytest.raises(ValueError, match=message):
            attend("op", SparseBlocks((4, 16), sizes, seed=seed).arguments(), False, 132)
    args = SparseBlocks((4, 16), sizes_of(4, 16), seed=seed).arguments()
    with pytest.raises(ValueError, match="max_parts=10000000 partial results"):
        attend("op", args._replace(max_parts=10**7), False, 132)
    assert missing_kernel(128, torch.bfloat16) is None


def test_tiles_hold_whole_queries_and_no_more_than_registers():
    for rows in (1, 4, 16, 64, 500):
        for gqa in (1, 3, 4, 7, 16, 71):
            for head_dim in (16, 64, 128, 256):
                tile = sparse_tile(rows, gqa, head_dim)
                assert tile.queries >= 1
                assert tile.queries * gqa <= tile.padded
                assert 16 <= tile.padded <= max(128, 2 * gqa)
                assert tile.padded & (tile.padded - 1) == 0


def test_results_of_few_queries_are_merged_in_one_go():
    """All columns at once, of the rows that there are; of many, no more values than registers hold."""
    assert [sparse_merge(1, gqa, 128) for gqa in (1, 3, 4)] == [(1, 128, 32), (4, 128, 8), (4, 128, 8)]
    assert sparse_merge(4, 4, 128) == (16, 128, 2)
    for queries, gqa, stored in ((16, 4, 128), (128, 1, 128), (64, 1, 256), (1, 71, 64)):
        merge = sparse_merge(queries, gqa, stored)
        assert merge.rows >= queries * gqa
        assert merge.rows * merge.columns * merge.chunk <= 4096


def test_a_launch_has_a_bounded_number_of_programs():
    assert most_programs(132, 8) * 8 == 132 * 8
    assert most_programs(1, 100) == 1


COMPILED = [
    (16, 16, 4, 128, "indices"),
    (1, 1, 8, 128, "indices"),
    (64, 64, 1, 128, "indices"),
    (128, 128, 1, 128, "masked"),
    (16, 4, 1, 256, "masked"),
    (64, SPARSE_PIECE, 4, 128, "variable"),
    (300, SPARSE_PIECE, 1, 64, "variable"),
]
FEW_SPILLED = 160
"""Bytes of a thread's stack: sums fill the registers of large tiles and of single warps, and some addresses are read
again."""

COMPILED_IN_EACH_RUN = (COMPILED[2], COMPILED[4], COMPILED[5])
"""One of each kind, with large tiles."""


@pytest.mark.drawn(most=1)
@pytest.mark.slow
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("rows", "columns", "gqa", "head_dim", "kind"),
    [pytest.param(*case, marks=[pytest.mark.whole] * (case not in COMPILED_IN_EACH_RUN)) for case in COMPILED],
)
def test_the_kernel_fits_registers_and_shared_memory(rows, columns, gqa, head_dim, kind, tmp_path):
    from compiled_llm_flashinfer.ops.kernels.sparse import block_sparse as module

    kernel, tile = module._block_sparse_attention, sparse_tile(rows, gqa, head_dim, kind == "masked")
    merge = sparse_merge(min(rows, tile.queries), gqa, head_dim)
    constants = {
        "GQA": gqa, "QUERIES": tile.padded, "USED": merge.rows, "HEAD": head_dim, "DIM": head_dim, "R": rows,
        "C": columns, "BLOCK": tile.block, "COLUMNS": merge.columns, "CHUNK": merge.chunk, "STAGES": tile.stages,
        "CAPPED": False, "VARIABLE": kind == "variable", **({} if kind == "masked" else {"mask": None}),
    }  # fmt: skip
    types = {
        **dict.fromkeys(("query", "key", "value", "out"), "*bf16"),
        **dict.fromkeys(("entries", "work_items", "arrivals"), "*i32"),
        **dict.fromkeys(("lse", "partials", "partial_lses"), "*fp32"),
        "mask": "*u8",
        **dict.fromkeys((name for name in kernel.arg_names if name.endswith("_stride")), "i32"),
        **dict.fromkeys(("items", "heads", "max_parts"), "i32"),
        **dict.fromkeys(("scale", "cap"), "fp32"),
    }
    aligned = [name for name in types if name in ("query", "key", "value", "out") or name.endswith("_stride")]
    made = compiled(kernel, constants, types, tile.warps, aligned)
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) <= FEW_SPILLED, "registers spill"
    assert made.metadata.shared <= 227 * 1024
    assert "cp.async.cg" in made.asm["ptx"], "keys are loaded while others are multiplied"
