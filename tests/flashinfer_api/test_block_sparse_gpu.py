"""Block-sparse attention on a GPU: as FlashInfer tests its wrappers, and replayed with other blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_llm_flashinfer import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
from compiled_llm_flashinfer.ops import block_sparse_attention_lse, variable_block_sparse_attention_lse
from support.flashinfer_api.sparse_blocks import BLOCKS, Sizes, SparseBlocks, VariableBlocks

pytestmark = pytest.mark.gpu

CLOSE = {torch.float16: {"rtol": 4e-3, "atol": 4e-3}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}
by_dtype = pytest.mark.parametrize("dtype", CLOSE, ids=str)


def sizes_of(queries: int, keys: int, **more: Any) -> Sizes:
    return Sizes(queries, keys, **{"device": "cuda", "dtype": torch.bfloat16, **more})


def compare(blocks: SparseBlocks | VariableBlocks, out: torch.Tensor, lse: torch.Tensor) -> None:
    expected, expected_lse = blocks.expected()
    torch.testing.assert_close(out.float(), expected, **CLOSE[out.dtype])
    torch.testing.assert_close(lse, expected_lse, rtol=5e-3, atol=5e-3)


@by_dtype
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_blocks(block, head_dim, masked, dtype, seed):
    rows, columns = block
    sizes = sizes_of(rows * max(3, 200 // rows), columns * max(5, 3000 // columns), head_dim=head_dim, dtype=dtype)
    for processors in (1, 132):
        blocks = SparseBlocks(block, sizes, masked=masked, spare=3, processors=processors, max_parts=1024, seed=seed)
        compare(blocks, *block_sparse_attention_lse(*blocks.arguments()))


@by_dtype
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (16, 4), (40, 2)])
@pytest.mark.parametrize("count", [(1, 1), (10, 50), (20, 100)], ids=str)
def test_blocks_of_any_sizes(count, heads, kv_heads, dtype, seed):
    sizes = sizes_of(1000, 4000, heads=heads, kv_heads=kv_heads, head_dim=128, dtype=dtype)
    for processors in (1, 132):
        blocks = VariableBlocks(count, sizes, processors=processors, max_parts=1024, seed=seed)
        compare(blocks, *variable_block_sparse_attention_lse(*blocks.arguments()))


def test_a_captured_run_follows_each_plan(seed):
    sizes = sizes_of(64, 8192, heads=16, kv_heads=4, head_dim=128)
    wrapper = BlockSparseAttentionWrapper(
        torch.empty(8, device="cuda"), max_items=900, max_parts=800, max_entries=4 * 512
    )
    graph, states, out = torch.cuda.CUDAGraph(), None, torch.empty(0)
    for number, density in enumerate((0.5, 0.0, 1.0, 0.02, 0.7)):
        blocks = SparseBlocks((16, 16), sizes, density=density, masked=True, seed=seed + number)
        plan = (blocks.indptr, blocks.indices, 64, 8192, 16, 16, 16, 4, 128, blocks.mask)
        wrapper.plan(*plan, sm_scale=blocks.scale)
        if states is None:
            states = blocks.states
            wrapper.run(*states)
            with torch.cuda.graph(graph):
                out = wrapper.run(*states)
        for held, given in zip(states, blocks.states, strict=True):
            held.copy_(given)
        graph.replay()
        expected = wrapper.run(*states)
        assert torch.equal(out, expected), density
        torch.testing.assert_close(out.float(), blocks.expected()[0], **CLOSE[torch.bfloat16])


def test_a_captured_run_of_variable_blocks_follows_each_plan(seed):
    sizes = sizes_of(500, 4000, heads=8, kv_heads=2, head_dim=64)
    wrapper = VariableBlockSparseAttentionWrapper(
        torch.empty(8, device="cuda"), max_items=2000, max_parts=1000, max_entries=4000
    )
    graph, states, out = torch.cuda.CUDAGraph(), None, torch.empty(0)
    for number, density in enumerate((0.5, 0.0, 1.0, 0.1)):
        blocks = VariableBlocks((10, 30), sizes, density=density, seed=seed + number)
        wrapper.plan(blocks.map, blocks.rows, blocks.columns, 8, 2, 64, sm_scale=blocks.scale)
        if states is None:
            states = [own.transpose(0, 1).contiguous() for own in blocks.states]
            wrapper.run(*states)
            with torch.cuda.graph(graph):
                out = wrapper.run(*states)
        for held, given in zip(states, blocks.states, strict=True):
            held.copy_(given.transpose(0, 1))
        graph.replay()
        assert torch.equal(out, wrapper.run(*states)), density
        torch.testing.assert_close(out.transpose(0, 1).float(), blocks.expected()[0], **CLOSE[torch.bfloat16])
