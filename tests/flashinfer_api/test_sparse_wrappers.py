"""FlashInfer's wrappers of block-sparse attention, on the CPU against dense attention over what each row reads."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_flashinfer import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
from compiled_llm_flashinfer.arguments import alibi_slopes
from support.flashinfer_api.sparse_blocks import Sizes, SparseBlocks, VariableBlocks
from support.flashinfer_api.strided_rows import dense, packed

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
HOW: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "ROPE_LLAMA": {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 500.0},
    "ROPE_LLAMA causal cap": {"pos_encoding_mode": "ROPE_LLAMA", "causal": True, "logits_soft_cap": 1.5},
    "ALIBI": {"pos_encoding_mode": "ALIBI"},
}


def as_dense(how: dict[str, Any], heads: int) -> dict[str, Any]:
    """What `dense` takes for FlashInfer's arguments."""
    own = {name: value for name, value in how.items() if name in ("causal", "logits_soft_cap")}
    if how.get("pos_encoding_mode") == "ROPE_LLAMA":
        own["rope"] = how.get("rope_scale", 1.0), how.get("rope_theta", 1e4)
    if how.get("pos_encoding_mode") == "ALIBI":
        own["slopes"] = alibi_slopes(heads, torch.device("cpu"))
    return own


def read_by_rows(blocks: SparseBlocks, masks: list[Tensor] | None = None, **how: Any) -> tuple[Tensor, Tensor]:
    """Dense attention of each row of blocks over the blocks that it reads, in their order."""
    (query, key, value), found = blocks.states, []
    for row, (begin, end) in enumerate(zip(blocks.indptr[:-1].tolist(), blocks.indptr[1:].tolist(), strict=True)):
        columns = blocks.indices[begin:end]
        own = (columns[:, None] * blocks.columns + torch.arange(blocks.columns)).flatten()
        rows = query[row * blocks.rows : (row + 1) * blocks.rows]
        mask = None if masks is None else masks[row]
        found.append(dense(rows, key[own], value[own], blocks.scale, mask=mask, **how))
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def close(found: Any, expected: tuple[Tensor, Tensor]) -> None:
    for own, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), exact, **CLOSE)


def planned(blocks: SparseBlocks, **how: Any) -> BlockSparseAttentionWrapper:
    wrapper = BlockSparseAttentionWrapper(torch.empty(8))
    sizes = blocks.sizes
    own = (sizes.queries, sizes.keys, blocks.rows, blocks.columns, sizes.heads, sizes.kv_heads, sizes.head_dim)
    wrapper.plan(blocks.indptr, blocks.indices, *own, **{"sm_scale": blocks.scale, "o_data_type": torch.float32, **how})
    return wrapper


@pytest.mark.parametrize("masked", [False, True])
def test_a_wrapper_plans_and_runs(masked: bool, seed: int) -> None:
    blocks = SparseBlocks((4, 16), Sizes(20, 80), masked=masked, seed=seed)
    wrapper = BlockSparseAttentionWrapper(torch.empty(8))
    wrapper.plan(
        blocks.indptr, blocks.indices.long(), 20, 80, 4, 16, 4, 2, 16, mask=blocks.mask, sm_scale=blocks.scale,
        q_data_type=torch.float32, o_data_type=torch.float32,
    )  # fmt: skip
    expected, expected_lse = blocks.expected()
    out = torch.empty_like(expected)
    found, lse = wrapper.run(*blocks.states, out=out, return_lse=True)
    assert found is out
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(lse, expected_lse, **CLOSE)
    torch.testing.assert_close(wrapper.run(*blocks.states), expected, **CLOSE)


def test_a_wrapper_of_variable_blocks_has_heads_first(seed: int) -> None:
    blocks = VariableBlocks((3, 5), Sizes(30, 70), seed=seed)
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(8))
    wrapper.plan(blocks.map, blocks.rows, blocks.columns, 4, 2, 16, sm_scale=blocks.scale)
    expected, expected_lse = blocks.expected()
    found, lse = wrapper.run(*(states.transpose(0, 1).contiguous() for states in blocks.states), return_lse=True)
    torch.testing.assert_close(found.transpose(0, 1), expected, **CLOSE)
    torch.testing.assert_close(lse.T, expected_lse, **CLOSE)


def test_tables_of_fixed_sizes_stay_where_they_are(seed: int) -> None:
    """And other blocks in them give what a new wrapper gives; what they have no room for is refused."""
    wrapper = BlockSparseAttentionWrapper(torch.empty(8), max_items=40, max_parts=16, max_entries=60)
    before = None
    for number, density in enumerate((0.6, 0.1, 0.9)):
        blocks = SparseBlocks((4, 16), Sizes(40, 80), density=density, masked=True, seed=seed + number)
        plan = (blocks.indptr, blocks.indices, 40, 80, 4, 16, 4, 2, 16, blocks.mask)
        wrapper.plan(*plan, sm_scale=blocks.scale, o_data_type=torch.float32)
        arguments = wrapper._arguments
        assert arguments is not None
        addresses = [own.data_ptr() for own in arguments if isinstance(own, Tensor)]
        assert before in (None, addresses)
        before = addresses
        torch.testing.assert_close(wrapper.run(*blocks.states), blocks.expected()[0], **CLOSE)
    full = SparseBlocks((4, 16), Sizes(80, 80), density=1.0, seed=seed)
    with pytest.raises(ValueError, match=r"indices: there is room for \(60,\); got \(95,\)|indptr: there is room"):
        wrapper.plan(full.indptr, full.indices, 80, 80, 4, 16, 4, 2, 16)
    torch.testing.assert_close(wrapper.run(*blocks.states), blocks.expected()[0], **CLOSE)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("block", [(1, 1), (4, 16), (5, 3)], ids=str)
def test_causal_blocks_and_positions(block: tuple[int, int], how: dict[str, Any], seed: int) -> None:
    blocks = SparseBlocks(block, Sizes(block[0] * 5, block[1] * 7), seed=seed)
    wrapper = planned(blocks, **how)
    expected, lse = read_by_rows(blocks, **as_dense(how, 4)), torch.empty(blocks.sizes.queries, 4)
    close(wrapper.run(*blocks.states, return_lse=True), expected)
    close((wrapper.run(*blocks.states, lse=lse), lse), expected)


def test_masks_in_bits_and_beside_positions(seed: int) -> None:
    blocks = SparseBlocks((4, 16), Sizes(20, 80), masked=True, seed=seed)
    assert blocks.mask is not None
    ends = blocks.indptr.tolist()
    masks = [blocks.mask[begin:end].transpose(0, 1).flatten(1) for begin, end in pairwise(ends)]
    bits, _ = packed(masks)
    for how in ({}, {"causal": True}):  # which a mask stands in for
        found = planned(blocks, packed_mask=bits, **how).run(*blocks.states, return_lse=True)
        close(found, read_by_rows(blocks, masks))
    rotated = HOW["ROPE_LLAMA"]
    found = planned(blocks, mask=blocks.mask, **rotated).run(*blocks.states, return_lse=True)
    close(found, read_by_rows(blocks, masks, **as_dense(rotated, 4)))
    with pytest.raises(ValueError, match=r"packed_custom_mask must be \[\d+\] uint8"):
        planned(blocks, packed_mask=bits[:-1])


def test_a_last_row_of_fewer_queries(seed: int) -> None:
    blocks = SparseBlocks((4, 16), Sizes(20, 80), seed=seed)
    blocks.states[0], blocks.sizes = blocks.states[0][:18], blocks.sizes._replace(queries=18)
    out, lse = read_by_rows(blocks)
    close(planned(blocks).run(*blocks.states, return_lse=True), (out, lse))
    with pytest.raises(ValueError, match="mask must be packed where R=4 does not divide M=18"):
        planned(blocks, mask=torch.ones(len(blocks.indices), 4, 16, dtype=torch.bool))


def test_fp8_with_scales_of_heads(seed: int) -> None:
    blocks = SparseBlocks((4, 16), Sizes(20, 80), seed=seed)
    exact = [states.to(torch.float8_e4m3fn).float() for states in blocks.states]
    scales = torch.rand(4) + 0.5, torch.rand(2) + 0.5, torch.rand(2) + 0.5
    wrapper = planned(blocks, q_data_type=torch.float8_e4m3fn, o_data_type=torch.float32)
    found = wrapper.run(*(states.to(torch.float8_e4m3fn) for states in exact), *scales, return_lse=True)
    of_heads = scales[0], *(own.repeat_interleave(2) for own in scales[1:])
    query, key = exact[0] * of_heads[0][:, None] * of_heads[1][:, None], exact[1]
    blocks.states = [query, key, exact[2]]
    out, lse = read_by_rows(blocks)
    close(found, (out * of_heads[2][:, None], lse))
    plain = planned(blocks)
    with pytest.raises(ValueError, match=r"scale_q is for queries of fp8; plan with q_data_type=torch\.float8_e4m3fn"):
        plain.run(*blocks.states, scale_q=torch.ones(4))


@pytest.mark.parametrize("how", [*HOW.values()], ids=HOW)
def test_variable_blocks_with_positions(how: dict[str, Any], seed: int) -> None:
    blocks = VariableBlocks((3, 5), Sizes(30, 70), seed=seed)
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(8))
    wrapper.plan(blocks.map, blocks.rows, blocks.columns, 4, 2, 16, sm_scale=blocks.scale, **how)
    query, key, value = (states.transpose(0, 1).contiguous() for states in blocks.states)
    out, lse = torch.zeros(4, 30, 16).double(), torch.zeros(4, 30).double()
    for head in range(2):
        begin = 0
        for row, count in enumerate(blocks.rows[head].tolist()):
            seen, queries = blocks.map[head, row].repeat_interleave(blocks.columns[head]), slice(begin, begin + count)
            own = query[2 * head : 2 * head + 2, queries].transpose(0, 1)
            states = (states[head, seen][:, None] for states in (key, value))
            results = dense(own, *states, blocks.scale, **as_dense(how, 2))
            for whole, found in zip((out, lse), results, strict=True):
                whole[2 * head : 2 * head + 2, queries] = found.transpose(0, 1)
            begin += count
    close(wrapper.run(query, key, value, return_lse=True), (out, lse))
    out_buffer = torch.empty(4, 30, 16)
    assert wrapper.run(query, key, value, out=out_buffer) is out_buffer
    torch.testing.assert_close(out_buffer.double(), out, **CLOSE)


def test_old_names(seed: int) -> None:
    blocks = SparseBlocks((4, 16), Sizes(20, 80), seed=seed)
    wrapper = planned(blocks)
    out = wrapper.forward(*blocks.states, sm_scale=blocks.scale, logits_soft_cap=1.5)
    torch.testing.assert_close(out, blocks.expected(1.5)[0], **CLOSE)
    with pytest.raises(ValueError, match="pos_encoding_mode must be 'NONE', as planned; got 'ALIBI'"):
        wrapper.forward(*blocks.states, pos_encoding_mode="ALIBI")
    wrapper.reset_workspace_buffer(torch.empty(8), torch.empty(8))
    wrapper.end_forward()
    variable, sizes = VariableBlocks((3, 5), Sizes(30, 70), seed=seed), (4, 2, 16)
    other = VariableBlockSparseAttentionWrapper(torch.empty(8))
    other.begin_forward(variable.map, variable.rows, variable.columns, *sizes)
    states = [own.transpose(0, 1).contiguous() for own in variable.states]
    out = other.forward(*states, sm_scale=variable.scale, logits_soft_cap=1.5)
    torch.testing.assert_close(out.transpose(0, 1), variable.expected(1.5)[0], **CLOSE)


def test_fixed_tables_of_blocks_with_positions(seed: int) -> None:
    wrapper = BlockSparseAttentionWrapper(torch.empty(8), max_items=40, max_parts=16, max_entries=60)
    before: list[int] = []
    for number, density in enumerate((0.6, 0.1, 0.9)):
        blocks = SparseBlocks((4, 16), Sizes(40, 80), density=density, masked=True, seed=seed + number)
        own = (40, 80, 4, 16, 4, 2, 16, blocks.mask)
        wrapper.plan(
            blocks.indptr, blocks.indices, *own, sm_scale=blocks.scale, o_data_type=torch.float32, **HOW["ROPE_LLAMA"]
        )
        assert wrapper._table is not None
        addresses = [table.data_ptr() for table in wrapper._table if table is not None]
        assert before in ([], addresses)
        before, ends = addresses, blocks.indptr.tolist()
        assert blocks.mask is not None
        masks = [blocks.mask[begin:end].transpose(0, 1).flatten(1) for begin, end in pairwise(ends)]
        found = wrapper.run(*blocks.states, return_lse=True)
        close(found, read_by_rows(blocks, masks, **as_dense(HOW["ROPE_LLAMA"], 4)))


@pytest.mark.parametrize("how", [{}, {"causal": True}], ids=str)
def test_one_graph(how: dict[str, Any], seed: int) -> None:
    blocks = SparseBlocks((4, 16), Sizes(20, 80), seed=seed)
    wrapper = planned(blocks, **how)
    compiled = torch.compile(lambda *states: wrapper.run(*states, return_lse=True), fullgraph=True, backend="aot_eager")
    close(compiled(*blocks.states), read_by_rows(blocks, **how))
    variable = VariableBlocks((3, 5), Sizes(30, 70), seed=seed)
    other = VariableBlockSparseAttentionWrapper(torch.empty(8))
    other.plan(variable.map, variable.rows, variable.columns, 4, 2, 16, sm_scale=variable.scale, **how)
    states = [own.transpose(0, 1).contiguous() for own in variable.states]
    torch.testing.assert_close(
        torch.compile(other.run, fullgraph=True, backend="aot_eager")(*states), other.run(*states)
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"M": 26}, r"indptr must be \[8\]"),
        ({"C": 7}, "R=4 rows and C=7 columns do not divide"),
        ({"R": 0}, "R=0 rows"),
    ],
)
def test_a_matrix_that_is_none_is_refused(given: dict[str, int], message: str, seed: int) -> None:
    blocks = SparseBlocks((4, 16), Sizes(20, 80), seed=seed)
    plan = {"M": 20, "N": 80, "R": 4, "C": 16, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, **given}
    with pytest.raises(ValueError, match=message):
        BlockSparseAttentionWrapper(torch.empty(8)).plan(blocks.indptr, blocks.indices, **plan)


def test_a_run_needs_its_plan(seed: int) -> None:
    blocks, wrapper = SparseBlocks((4, 16), Sizes(20, 80), seed=seed), BlockSparseAttentionWrapper(torch.empty(8))
    with pytest.raises(RuntimeError, match=r"call plan\(\) before run\(\)"):
        wrapper.run(*blocks.states)
    wrapper.plan(blocks.indptr, blocks.indices, 20, 80, 4, 16, 4, 2, 16)
    query, key, value = blocks.states
    for states, message in (
        ((query[:16], key, value), r"q must be \(20, 4, 16\), as planned; got \(16, 4, 16\)"),
        ((query, key[:64], value), r"k must be \(80, 2, 16\), as planned; got \(64, 2, 16\)"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(*states)
    with pytest.raises(ValueError, match="give both"):
        BlockSparseAttentionWrapper(torch.empty(8), max_items=3)
    with pytest.raises(KeyError, match="pos_encoding_mode='OTHER' does not exist"):
        wrapper.plan(blocks.indptr, blocks.indices, 20, 80, 4, 16, 4, 2, 16, pos_encoding_mode="OTHER")
    with pytest.raises(NotImplementedError, match="backend='cudnn' is left out of this API"):
        BlockSparseAttentionWrapper(torch.empty(8), backend="cudnn")
