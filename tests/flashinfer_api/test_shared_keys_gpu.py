"""FlashInfer's API of latents, shared keys and blocks on a GPU: against dense attention, and beside FlashInfer."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_llm_flashinfer as ours
from support.flashinfer_api.latent_pools import LatentPools
from support.flashinfer_api.levels import Levels
from support.flashinfer_api.sparse_blocks import Sizes, SparseBlocks, VariableBlocks
from support.gpu import captured, needs_cuda, on_gpu, seeded

pytestmark = [pytest.mark.gpu, needs_cuda, seeded]

NEAR = {"rtol": 3e-2, "atol": 3e-2}
LENGTHS, QUERIES = [1, 64, 65, 700, 0, 33], [1, 3, 17, 40, 2, 0]
needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is missing")


def workspace() -> Tensor:
    return torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for own, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(own.cpu().double(), exact.cpu().double(), **NEAR)


def latents(heads: int, lengths: list[int] = LENGTHS, queries: list[int] = QUERIES, **sizes: Any) -> LatentPools:
    return LatentPools(lengths, queries, heads=heads, rank=512, rope=64, dtype=torch.bfloat16, **sizes)


# ---- latents


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("heads", [16, 128])
def test_latents(heads: int, page_size: int, causal: bool, seed: int) -> None:
    rows = latents(heads, page_size=page_size, seed=seed)
    wrapper = ours.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(*on_gpu(rows.plan(causal)))
    query, rope, *_ = on_gpu(rows.apart)
    pool = rows.pool.cuda()
    for pools in ((pool[..., :512], pool[..., 512:]), (pool[..., :512].contiguous(), pool[..., 512:].contiguous())):
        close(wrapper.run(query, rope, *pools, return_lse=True), rows.expected(causal))


@pytest.mark.parametrize("count", [1, 64])
def test_long_rows_of_latents_that_programs_share(count: int, seed: int) -> None:
    rows = latents(16, [8192] + [100] * (count - 1), [1] * count, page_size=64, seed=seed)
    wrapper = ours.BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(*on_gpu(rows.plan(True)))
    close(wrapper.run(*on_gpu(rows.parts), return_lse=True), rows.expected(True))


def test_captured_latents_follow_later_plans(seed: int) -> None:
    batches = [latents(16, lengths, [1] * 3, page_size=16, seed=seed) for lengths in ([900, 5, 64], [3, 700, 200])]
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    buffers = dict(zip(names, (torch.zeros(size, dtype=torch.int32).cuda() for size in (4, 4, 200, 3)), strict=True))
    wrapper = ours.BatchMLAPagedAttentionWrapper(workspace(), use_cuda_graph=True, **buffers)
    pool, query = torch.zeros(200, 16, 576).cuda().bfloat16(), torch.zeros(3, 16, 576).cuda().bfloat16()
    out, lse = torch.empty(3, 16, 512).cuda().bfloat16(), torch.empty(3, 16).cuda()

    def run() -> None:
        states = (query[..., :512], query[..., 512:], pool[..., :512], pool[..., 512:])
        wrapper.run(*states, out=out, lse=lse, return_lse=True)

    def load(rows: LatentPools) -> None:
        wrapper.plan(*on_gpu(rows.plan(False)))
        query.copy_(rows.query)
        pool[: len(rows.pool)].copy_(rows.pool)

    load(batches[0])
    graph, _ = captured(run)
    for rows in (*batches, batches[0]):
        load(rows)
        graph.replay()
        close((out, lse), rows.expected(False))


@needs_flashinfer
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
def test_latents_beside_flashinfer(heads: int, causal: bool, seed: int) -> None:
    import flashinfer

    lengths = [1, 64, 65, 700, 33]
    rows = latents(heads, lengths, [1, 3, 17, 40, 2], page_size=64, seed=seed)
    rows.pool = rows.pool.nan_to_num()
    found = []
    for module in (ours, flashinfer):
        wrapper: Any = module.mla.BatchMLAPagedAttentionWrapper(workspace(), backend="fa2")
        wrapper.plan(*on_gpu(rows.plan(causal)))
        found.append(wrapper.run(*on_gpu(rows.apart), return_lse=True))
    close(*found)


# ---- shared keys


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_levels(levels: int, causal: bool, seed: int) -> None:
    batch = Levels(levels, page_size=16, head_dim=64, dtype=torch.bfloat16, seed=seed)
    wrapper = ours.MultiLevelCascadeAttentionWrapper(levels, workspace(), "HND")
    plan = {name: on_gpu(own) if isinstance(own, list) else own for name, own in batch.plan(causal=causal).items()}
    wrapper.plan(**plan)
    pages = tuple(on_gpu(batch.rows.pools))
    close((wrapper.run(batch.query.cuda(), pages),), (batch.expected(causal=causal),))


@needs_flashinfer
def test_levels_beside_flashinfer(seed: int) -> None:
    import flashinfer

    batch = Levels(3, page_size=16, head_dim=64, dtype=torch.bfloat16, seed=seed)
    plan = {name: on_gpu(own) if isinstance(own, list) else own for name, own in batch.plan(causal=True).items()}
    pages = torch.stack(batch.rows.pools, 1).nan_to_num().cuda()
    found = []
    for module in (ours, flashinfer):
        wrapper: Any = module.MultiLevelCascadeAttentionWrapper(3, workspace(), "HND")
        wrapper.plan(**plan)
        found.append((wrapper.run(batch.query.cuda(), pages),))
    close(*found)


# ---- blocks


def blocks_of(block: tuple[int, int], masked: bool, seed: int) -> SparseBlocks:
    sizes = Sizes(block[0] * 9, block[1] * 20, head_dim=64, dtype=torch.bfloat16)
    return SparseBlocks(block, sizes, masked=masked, seed=seed)


def plan_of(blocks: SparseBlocks, **how: Any) -> dict[str, Any]:
    sizes = blocks.sizes
    names = {"M": sizes.queries, "N": sizes.keys, "R": blocks.rows, "C": blocks.columns}
    heads = {"num_qo_heads": sizes.heads, "num_kv_heads": sizes.kv_heads, "head_dim": sizes.head_dim}
    return {**names, **heads, "sm_scale": blocks.scale, "q_data_type": sizes.dtype, "o_data_type": sizes.dtype, **how}


HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "ROPE_LLAMA": {"pos_encoding_mode": "ROPE_LLAMA"},
    "ALIBI": {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 8.0},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("block", [(1, 1), (16, 16), (5, 3)], ids=str)
def test_blocks_as_on_a_cpu(block: tuple[int, int], masked: bool, how: dict[str, Any], seed: int) -> None:
    blocks = blocks_of(block, masked, seed)
    found = []
    for room in (workspace(), torch.empty(1)):
        wrapper = ours.BlockSparseAttentionWrapper(room)
        wrapper.plan(blocks.indptr, blocks.indices, **plan_of(blocks, mask=blocks.mask, **how))
        found.append(wrapper.run(*(own.to(room.device) for own in blocks.states), return_lse=True))
    close(*found)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_variable_blocks_as_on_a_cpu(how: dict[str, Any], seed: int) -> None:
    blocks = VariableBlocks((10, 20), Sizes(100, 300, head_dim=64, dtype=torch.bfloat16), seed=seed)
    found = []
    for room in (workspace(), torch.empty(1)):
        wrapper = ours.VariableBlockSparseAttentionWrapper(room)
        wrapper.plan(blocks.map, blocks.rows, blocks.columns, 4, 2, 64, q_data_type=torch.bfloat16, **how)
        states = (own.transpose(0, 1).contiguous().to(room.device) for own in blocks.states)
        found.append(wrapper.run(*states, return_lse=True))
    close(*found)


@needs_flashinfer
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_beside_flashinfer(masked: bool, seed: int) -> None:
    import flashinfer

    blocks = blocks_of((16, 16), masked, seed)
    read = blocks.indptr[1:] > blocks.indptr[:-1]  # of rows that read nothing, FlashInfer says nothing
    rows = read.repeat_interleave(16)
    found = []
    for module in (ours, flashinfer):
        wrapper: Any = module.BlockSparseAttentionWrapper(workspace())
        mask = None if blocks.mask is None else blocks.mask.cuda()
        wrapper.plan(blocks.indptr.cuda(), blocks.indices.cuda(), **plan_of(blocks, mask=mask))
        out, lse = wrapper.run(*on_gpu(blocks.states), return_lse=True)
        found.append((out.cpu()[rows], lse.cpu()[rows]))
    close(*found)
