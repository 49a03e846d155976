"""FlashInfer's wrappers of rows that share keys, against dense attention over each row's own and shared ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import compiled_llm_flashinfer as flashinfer
from support.flashinfer_api.levels import LEVELS, MEMBERS, Levels
from support.flashinfer_api.strided_rows import StridedRows

WORKSPACE = torch.empty(1, dtype=torch.uint8)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_levels(page_size: int, levels: int, causal: bool, seed: int) -> None:
    batch = Levels(levels, page_size=page_size, seed=seed)
    for kv_layout, pages in batch.rows.layouts().values():
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(levels, WORKSPACE, kv_layout)
        wrapper.plan(**batch.plan(causal=causal))
        close(wrapper.run(batch.query, pages), batch.expected(causal=causal))
    assert torch.equal(wrapper.forward(batch.query, pages), wrapper.run(batch.query, pages))


def test_caps_and_scales(seed: int) -> None:
    batch = Levels(seed=seed)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, WORKSPACE, "HND")
    wrapper.plan(**batch.plan(logits_soft_cap=1.5, sm_scale=batch.rows.scale))
    close(wrapper.run(batch.query, batch.rows.pools), batch.expected(logits_soft_cap=1.5))


def test_plans_write_to_the_users_buffers(seed: int) -> None:
    batch = Levels(seed=seed)
    names = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    buffers = {
        f"{name}_buf_arr": [torch.zeros_like(own) for own in column]
        for name, column in zip(names, batch.tables(), strict=True)
    }
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, WORKSPACE, "HND", use_cuda_graph=True, **buffers)
    assert wrapper.is_cuda_graph_enabled
    for other in (Levels(queries=[1, 2, 5, 1, 2], seed=seed), batch):
        wrapper.plan(**other.plan(causal=False))
        close(wrapper.run(other.query, other.rows.pools), other.expected(causal=False))
        for column, own in zip(buffers.values(), other.tables(), strict=True):
            assert all(map(torch.equal, column, own))
    wrapper.reset_workspace_buffer(WORKSPACE, [WORKSPACE] * 3)
    before = [own.clone() for column in buffers.values() for own in column]
    wide = Levels(page_size=1, seed=seed)
    with pytest.raises(ValueError, match="buffers of level 0 have room for 3 entries; got 9"):
        wrapper.plan(**wide.plan())
    tables = batch.plan()
    tables["paged_kv_last_page_len"] = [*tables["paged_kv_last_page_len"][:2], torch.ones(3)]
    with pytest.raises(ValueError, match=r"level 2 must have tables of 5 rows: .*; got \[6, 6, \d+, 3\]"):
        wrapper.plan(**tables)
    after = [own for column in buffers.values() for own in column]
    assert all(map(torch.equal, before, after)), "nothing is written of any level"
    short = {**buffers, "paged_kv_indices_buf_arr": buffers["paged_kv_indices_buf_arr"][:2]}
    with pytest.raises(ValueError, match="paged_kv_indices_buf_arr must have a tensor for each of 3 levels; got 2"):
        flashinfer.MultiLevelCascadeAttentionWrapper(3, WORKSPACE, "HND", use_cuda_graph=True, **short)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_one_prefix_of_all_rows(causal: bool, kv_layout: str, seed: int) -> None:
    batch = Levels(seed=seed)
    batch.lengths, batch.members = [LEVELS[0], LEVELS[2]], [MEMBERS[0], MEMBERS[2]]
    batch.rows = StridedRows([*itertools.chain(*batch.lengths)], [0] * 6, seed=seed)
    qo_indptr, *table = (column[1] for column in batch.tables())
    prefix = batch.rows.keys[0], batch.rows.values[0]
    shared = [states if kv_layout == "NHD" else states.transpose(0, 1) for states in prefix]
    pages = tuple(pool if kv_layout == "HND" else pool.transpose(1, 2) for pool in batch.rows.pools)
    prefill = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(WORKSPACE, kv_layout)
    prefill.begin_forward(qo_indptr, *table, 4, 2, 16, 4)
    close(prefill.forward(batch.query, *shared, pages, causal=causal), batch.expected(causal=causal))
    scaled = prefill.forward(batch.query, *shared, pages, causal=causal, sm_scale=0.5 * batch.rows.scale)
    batch.query = batch.query / 2
    close(scaled, batch.expected(causal=causal))
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE, kv_layout)
    decode.begin_forward(*table, 4, 2, 16, 4, data_type=torch.float32)
    batch.query, batch.queries = batch.query[:5], [1] * 5
    close(decode.forward(batch.query, *shared, pages), batch.expected())
    decode.end_forward()


def test_one_graph(seed: int) -> None:
    batch = Levels(seed=seed)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(3, WORKSPACE, "HND")
    wrapper.plan(**batch.plan(causal=True))
    compiled = torch.compile(
        lambda q, keys, values: wrapper.run(q, (keys, values)), fullgraph=True, backend="aot_eager"
    )
    close(compiled(batch.query, *batch.rows.pools), batch.expected(causal=True))


def test_bad_input_is_refused(seed: int) -> None:
    batch = Levels(seed=seed)
    with pytest.raises(ValueError, match="num_levels must be at least 1; got 0"):
        flashinfer.MultiLevelCascadeAttentionWrapper(0, WORKSPACE)
    with pytest.raises(KeyError, match="kv_layout='DNH' does not exist"):
        flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE, "DNH")
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE, "HND")
    with pytest.raises(ValueError, match="qo_indptr_arr must have a tensor for each of 2 levels; got 3"):
        wrapper.plan(**batch.plan())
    two, qo_indptr = Levels(2, seed=seed), torch.tensor([0, 3, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"qo_indptr_arr must end with one number of queries .*; got \[5, 11\]"):
        wrapper.plan(**{**two.plan(), "qo_indptr_arr": [qo_indptr, two.tables()[0][1]]})
    with pytest.raises(RuntimeError, match=r"call plan\(\) before run\(\)"):
        wrapper.run(two.query, two.rows.pools)
    decode = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(WORKSPACE, "HND")
    shared = torch.zeros(2, 3, 16)
    with pytest.raises(RuntimeError, match=r"call begin_forward\(\) before forward\(\)"):
        decode.forward(batch.query, shared, shared, batch.rows.pools)
    table = [column[-1] for column in batch.tables()][1:]
    with pytest.raises(ValueError, match=r"indptr must be \[6\] for 5 rows; got \[3\]"):
        decode.begin_forward(table[0][:3], *table[1:], 4, 2, 16, 4)
    decode.begin_forward(*table, 4, 2, 16, 4)
    with pytest.raises(ValueError, match=r"q must be \[5, H, D\], as planned; got \(11, 4, 16\)"):
        decode.forward(batch.query, shared, shared, batch.rows.pools)
