"""FlashInfer's attention over latents, against dense attention in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_llm_flashinfer as flashinfer
from compiled_llm_flashinfer import mla
from compiled_llm_flashinfer.ops import strided_latent_attention
from support.flashinfer_api.latent_pools import LatentPools

WORKSPACE = torch.empty(1, dtype=torch.uint8)


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    near = 1e-4 if found[0].dtype == torch.float32 else 2e-2
    for own, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), exact, rtol=near, atol=near / 10)


def planned(rows: LatentPools, causal: bool = False, **options: Any) -> mla.BatchMLAPagedAttentionWrapper:
    wrapper = mla.BatchMLAPagedAttentionWrapper(WORKSPACE, **options)
    wrapper.plan(*rows.plan(causal))
    return wrapper


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_and_views_of_one_pool(dtype: torch.dtype, page_size: int, causal: bool, seed: int) -> None:
    rows = LatentPools(page_size=page_size, heads=3, rope=8, dtype=dtype, seed=seed)
    wrapper = planned(rows, causal)
    for states in (rows.parts, rows.apart):
        found = wrapper.run(*states, return_lse=True)
        check(found, rows.expected(causal))
        assert torch.equal(wrapper.run(*states), found[0])
    without_keys = rows.qo_indptr[4], rows.qo_indptr[5]
    assert not found[0][without_keys[0] : without_keys[1]].any()
    assert (found[1][without_keys[0] : without_keys[1]] == -math.inf).all()


def test_strided_pools_and_wide_tables(seed: int) -> None:
    """Every other page, slots before pages, and int64."""
    rows = LatentPools(seed=seed)
    query, rope, latents, ropes = rows.parts
    spread = latents.new_full((4, 2 * len(latents), 16), math.nan).transpose(0, 1)
    spread[::2] = latents
    out, lse = torch.empty_like(query.contiguous()), torch.empty(query.shape[:2])
    table = [own.long() for own in rows.table]
    strided_latent_attention(query, rope, spread[::2], ropes, out, lse, *table, rows.scale, True)
    check((out, lse), rows.expected(True))


def test_results_are_written_where_they_are_wanted(seed: int) -> None:
    rows = LatentPools(seed=seed)
    wrapper, expected = planned(rows), rows.expected(False)
    out, lse = torch.empty(len(rows.query), 4, 16), torch.empty(len(rows.query), 4)
    found = wrapper.run(*rows.apart, out=out, lse=lse, return_lse=True)
    assert found[0] is out
    assert found[1] is lse
    check((out, lse), expected)
    lse.zero_()
    assert wrapper.run(*rows.apart, lse=lse) is not lse, "it is written, and not returned"
    check((out, lse), expected)
    natural = wrapper.run(*rows.apart, return_lse=True, return_lse_base_on_e=True)[1]
    check((out, natural), (expected[0], expected[1] * math.log(2)))


def test_a_plan_is_followed_from_buffers_of_fixed_addresses(seed: int) -> None:
    most, first = LatentPools([9, 9, 9], [1, 1, 1], seed=seed), LatentPools([9, 2, 5], [1, 1, 1], seed=seed + 1)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    buffers = {name: torch.zeros_like(own) for name, own in zip(names, most.table, strict=True)}
    wrapper = mla.BatchMLAPagedAttentionWrapper(WORKSPACE, use_cuda_graph=True, **buffers)
    assert wrapper.is_cuda_graph_enabled
    for rows in (first, most):
        wrapper.plan(*rows.plan(True))
        check(wrapper.run(*rows.apart, return_lse=True), rows.expected(True))
        assert wrapper._table is not None
        assert all(own is buffers[name] for name, own in zip(names, wrapper._table, strict=True))
    with pytest.raises(ValueError, match=r"with CUDA graphs qo_indptr must be \[4\], as its buffer; got 2 rows"):
        wrapper.plan(*LatentPools([3, 3], [1, 1]).plan(True))
    with pytest.raises(ValueError, match=r"kv_indices has room for 9 entries; got 12"):
        wrapper.plan(*LatentPools([16, 16, 16], [1, 1, 1]).plan(True))
    with pytest.raises(ValueError, match=r"kv_len_arr must be a tensor with use_cuda_graph=True; got None"):
        mla.BatchMLAPagedAttentionWrapper(WORKSPACE, use_cuda_graph=True, **{**buffers, "kv_len_arr": None})


def test_without_a_plan_as_cutlass(seed: int) -> None:
    rows = LatentPools([1, 4, 5, 17], [1] * 4, seed=seed)
    rows.scale = mla.CUTLASS_SCALE
    pages = torch.zeros(4, 5, dtype=torch.int32)
    for row, (first, end) in enumerate(zip(rows.indptr[:-1], rows.indptr[1:], strict=True)):
        pages[row, : end - first] = rows.indices[first:end]
    wrapper = mla.BatchMLAPagedAttentionWrapper(WORKSPACE, backend="cutlass")
    out = wrapper.run(*rows.apart, kv_len=rows.kv_len, page_table=pages)
    torch.testing.assert_close(out.double(), rows.expected(False)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r'kv_len must be \[4\], and page_table \[4, n\], with backend="cutlass"; got'):
        wrapper.run(*rows.apart)


def test_one_graph(seed: int) -> None:
    rows = LatentPools(seed=seed)
    wrapper = planned(rows, True)
    compiled = torch.compile(lambda *states: wrapper.run(*states, return_lse=True), fullgraph=True, backend="aot_eager")
    for own in (rows, LatentPools([7], [2], seed=seed)):
        wrapper.plan(*own.plan(True))
        check(compiled(*own.apart), own.expected(True))


def test_new_latents_are_written_into_pages(seed: int) -> None:
    rows = LatentPools(seed=seed)
    new = torch.cat(rows.states)
    token_rows = torch.cat([torch.full((length,), row) for row, length in enumerate(rows.lengths)]).int()
    positions = torch.cat([torch.arange(length) for length in rows.lengths]).int()
    pools = [torch.full_like(pool, math.nan) for pool in rows.apart[2:]]
    last = torch.ones(len(rows.lengths), dtype=torch.int32)
    table = (token_rows, positions, *pools, rows.indices, rows.indptr, last)
    flashinfer.append_paged_mla_kv_cache(new[:, :16], new[:, 16:], *table)
    for found, expected in zip(pools, rows.parts[2:], strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)
    with pytest.raises(ValueError, match=r"kpe_cache must be \[P, S, ...\]; got None"):
        flashinfer.append_paged_mla_kv_cache(new[:, :16], new[:, 16:], *table[:3], None, *table[4:])


def test_bad_input_is_refused_before_anything_is_written(seed: int) -> None:
    rows = LatentPools(seed=seed)
    wrapper, (query, rope, latents, ropes) = planned(rows), rows.apart
    with pytest.raises(RuntimeError, match=r"call plan\(\) before run\(\)"):
        mla.BatchMLAPagedAttentionWrapper(WORKSPACE).run(*rows.apart)
    for states, message in (
        ((query.half(), rope.half(), latents, ropes), "q must be torch.float32, as planned; got torch.float16"),
        ((query, rope, latents[:, :2], ropes), r"ckv_cache must be \[P, 4, 16\], as planned; got \(\d+, 2, 16\)"),
        ((query, rope[:, :2], latents, ropes), r"q_pe must be \[T, 4, 16\], as planned; got"),
        (tuple(own[1:] for own in rows.apart), r"q_nope must have 17 tokens, as planned; got"),
        ((query, rope[1:], latents, ropes), r"queries must be \[T, H, R\] and \[T, H, E\]"),
    ):
        with pytest.raises(ValueError, match=message):
            wrapper.run(*states)
    with pytest.raises(ValueError, match=r"out must be .*; got \(1,\)"):
        wrapper.run(*rows.apart, out=torch.empty(1))
    for options, name in (({"profiler_buffer": query}, "profiler_buffer"), ({"o_scale": 0.5}, "o_scale")):
        with pytest.raises(NotImplementedError, match=f"^{name}=.* is left out of this API; "):
            wrapper.run(*rows.apart, **options)
    with pytest.raises(NotImplementedError, match=r"^use_profiler=True is left out of this API; use torch.profiler"):
        wrapper.plan(*rows.plan(False), use_profiler=True)
    with pytest.raises(ValueError, match=r"qo_indptr must be \[8\] for 7 rows of kv_len_arr; got \[3\]"):
        wrapper.plan(rows.qo_indptr[:3], *rows.plan(False)[1:])
