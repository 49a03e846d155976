"""FlashInfer's functions and wrappers over our ops on the CPU, against dense attention in float64.

`test_strided_attention.py` has the op at its borders: here, arguments are seen to arrive, in each layout.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_llm_flashinfer as flashinfer
from compiled_llm_flashinfer.arguments import LEFT_OUT, alibi_slopes
from support.flashinfer_api.latent_pools import LatentPools
from support.flashinfer_api.strided_rows import StridedRows, dense, packed
from support.imports import CHECKOUT

WORKSPACE = torch.empty(8, dtype=torch.uint8)
LENGTHS, QUERIES = [1, 4, 5, 17, 9], [1, 3, 5, 2, 0]

HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 3},
    "cap": {"logits_soft_cap": 1.5, "sm_scale": 0.7},
    "ROPE_LLAMA": {"pos_encoding_mode": "ROPE_LLAMA"},
    "ROPE_LLAMA of another base": {"pos_encoding_mode": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 500.0},
    "ALIBI": {"pos_encoding_mode": "ALIBI", "window_left": 5},
}


def as_dense(how: dict[str, Any], heads: int = 4) -> dict[str, Any]:
    """What `dense` takes for FlashInfer's arguments."""
    own = dict(how)
    mode, scale, theta = own.pop("pos_encoding_mode", "NONE"), own.pop("rope_scale", 1.0), own.pop("rope_theta", 1e4)
    if "sm_scale" in own:
        own["scale"] = own.pop("sm_scale")
    if mode == "ROPE_LLAMA":
        own["rope"] = scale, theta
    if mode == "ALIBI":
        own["slopes"] = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])
    return own


def close(found: Any, expected: tuple[Tensor, Tensor], near: float = 1e-5) -> None:
    for own, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), exact, rtol=10 * near, atol=near)


# ---- gradients


@pytest.mark.parametrize("asking", ["query", "keys", "values"])
def test_tensors_that_require_gradients_are_refused(asking: str) -> None:
    q, k, v = (
        torch.randn(shape, requires_grad=name == asking)
        for name, shape in (("query", (5, 4, 16)), ("keys", (7, 2, 16)), ("values", (7, 2, 16)))
    )
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(torch.tensor([0, 5]), torch.tensor([0, 7]), 4, 2, 16, causal=True, q_data_type="float32")
    for call in (
        lambda: flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True),
        lambda: flashinfer.single_decode_with_kv_cache(q[0], k, v),
        lambda: ragged.run(q, k, v),
    ):
        with pytest.raises(RuntimeError, match=rf"{asking}\.requires_grad is True.*torch\.no_grad\(\)"):
            call()
        with torch.no_grad():
            call()


# ---- one row


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("length", [1, 33])
def test_single_decode(length: int, how: dict[str, Any], kv_layout: str, seed: int) -> None:
    rows = StridedRows([length], [1], seed=seed)
    keys, values = (states if kv_layout == "NHD" else states.transpose(0, 1) for states in rows.ragged)
    found = flashinfer.single_decode_with_kv_cache(
        rows.query[0], keys, values, kv_layout, **how, q_scale=0.5, k_scale=2.0, v_scale=0.5, return_lse=True
    )
    out, lse = rows.expected(**as_dense(how))
    close(found, (out[0] * 0.5, lse[0]))
    alone = flashinfer.single_decode_with_kv_cache(rows.query[0], keys, values, kv_layout, **how)
    assert torch.equal(alone * 0.5, found[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_single_prefill(how: dict[str, Any], kv_layout: str, causal: bool, seed: int) -> None:
    rows = StridedRows([33], [7], head_dim=24, value_dim=16, seed=seed)
    keys, values = (states if kv_layout == "NHD" else states.transpose(0, 1).contiguous() for states in rows.ragged)
    options: dict[str, Any] = {"causal": causal, "kv_layout": kv_layout, **how}
    found = flashinfer.single_prefill_with_kv_cache_return_lse(rows.query, keys, values, **options)
    close(found, rows.expected(causal=causal, **as_dense(how)))
    alone = flashinfer.single_prefill_with_kv_cache(rows.query, keys, values, **options)
    assert torch.equal(alone, found[0])


def test_single_prefill_with_a_mask_packed_or_not(seed: int) -> None:
    rows = StridedRows([33], [7], seed=seed)
    masks = rows.masks()
    how: dict[str, Any] = {"causal": True, "return_lse": True}
    found = flashinfer.single_prefill_with_kv_cache(rows.query, *rows.ragged, custom_mask=masks[0], **how)
    close(found, rows.expected(masks))
    assert (found[0][0] == 0).all()
    assert (found[1][0] == -torch.inf).all()
    bits, _ = packed(masks)
    other = flashinfer.single_prefill_with_kv_cache(rows.query, *rows.ragged, packed_custom_mask=bits, **how)
    assert torch.equal(found[0], other[0])


def test_single_prefill_with_more_queries_than_keys(seed: int) -> None:
    rows = StridedRows([3], [7], seed=seed)
    found = flashinfer.single_prefill_with_kv_cache(rows.query, *rows.ragged, causal=True, return_lse=True)
    close(found, rows.expected(causal=True))
    assert (found[0][:4] == 0).all()


def test_single_prefill_in_fp8_with_scales_of_heads(seed: int) -> None:
    rows = StridedRows([33], [7], dtype=torch.float8_e4m3fn, seed=seed)
    scales = torch.rand(4), torch.rand(2), torch.rand(2)
    found = flashinfer.single_prefill_with_kv_cache(
        rows.query, *rows.ragged, *scales, torch.float32, causal=True, return_lse=True
    )
    rows.query = rows.query.float() * (scales[0] * scales[1].repeat_interleave(2))[:, None]
    out, lse = rows.expected(causal=True)
    close(found, (out * scales[2].repeat_interleave(2)[:, None], lse))


# ---- pages


def planned_decode(rows: StridedRows, kv_layout: str, **how: Any) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, kv_layout)
    heads = rows.heads, rows.kv_heads, rows.query.shape[2], rows.page_size
    wrapper.plan(*rows.table[1:], *heads, q_data_type=rows.query.dtype, **{"kv_data_type": rows.pools[0].dtype, **how})
    return wrapper


def planned_prefill(rows: StridedRows, kv_layout: str, **how: Any) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, kv_layout)
    heads = rows.heads, rows.kv_heads, rows.query.shape[2], rows.page_size
    wrapper.plan(*rows.table, *heads, q_data_type=rows.query.dtype, **{"kv_data_type": rows.pools[0].dtype, **how})
    return wrapper


LAYOUTS = sorted(StridedRows([1], [1]).layouts())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_layouts_are_the_same_to_the_bit(layout: str, page_size: int, seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, page_size=page_size, seed=seed)
    name, pages = rows.layouts()[layout]
    found = planned_prefill(rows, name, causal=True).run(rows.query, pages, return_lse=True)
    close(found, rows.expected(causal=True))
    first_name, first = rows.layouts()["HND, two"]
    first_found = planned_prefill(rows, first_name, causal=True).run(rows.query, first, return_lse=True)
    assert torch.equal(found[0], first_found[0])
    newest = rows.query[: len(LENGTHS)]
    decoded, other = (
        planned_decode(rows, kv_layout).run(newest, given) for kv_layout, given in ((name, pages), (first_name, first))
    )
    assert torch.equal(decoded, other)


def test_the_axis_of_pages_of_one_token_may_be_left_out(seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, page_size=1, seed=seed)
    name, pages = rows.layouts()["NHD"]
    wrapper = planned_prefill(rows, name)
    assert torch.equal(wrapper.run(rows.query, pages[:, :, 0]), wrapper.run(rows.query, pages))
    both = pages[:, 0, 0], pages[:, 1, 0]
    assert torch.equal(wrapper.run(rows.query, both), wrapper.run(rows.query, pages))


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("queries", [1, 3])
def test_batch_decode(queries: int, how: dict[str, Any], seed: int) -> None:
    lengths = [max(length, queries) for length in LENGTHS]
    rows = StridedRows(lengths, [queries] * len(lengths), seed=seed)
    name, pages = rows.layouts()["NHD"]
    wrapper = planned_decode(rows, name, **how)
    out, lse = torch.full_like(rows.query, torch.nan), torch.full(rows.query.shape[:2], torch.nan)
    found = wrapper.run(rows.query, pages, q_scale=0.5, k_scale=2.0, v_scale=0.5, out=out, lse=lse, return_lse=True)
    assert found[0] is out
    assert found[1] is lse
    expected, expected_lse = rows.expected(causal=True, **as_dense(how))
    close(found, (expected * 0.5, expected_lse))
    assert torch.equal(wrapper.run_return_lse(rows.query, pages)[1], lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_batch_prefill_paged_and_ragged(how: dict[str, Any], causal: bool, seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, seed=seed)
    name, pages = rows.layouts()["NHD"]
    expected = rows.expected(causal=causal, **as_dense(how))
    wrapper = planned_prefill(rows, name, causal=causal, **how)
    close(wrapper.run_return_lse(rows.query, pages), expected)
    for kv_layout in ("NHD", "HND"):
        ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, kv_layout)
        ragged.plan(rows.qo_indptr, starts(rows), 4, 2, 16, q_data_type="float32", causal=causal, **how)
        states = [own if kv_layout == "NHD" else own.transpose(0, 1) for own in rows.ragged]
        close(ragged.run_return_lse(rows.query, *states), expected)
        options = {name: value for name, value in how.items() if name != "causal"}
        close(ragged.forward_return_lse(rows.query, *states, causal=causal, **options), expected)


def starts(rows: StridedRows) -> Tensor:
    return torch.tensor([0, *rows.lengths]).cumsum(0).int()


@pytest.mark.parametrize("is_packed", [False, True])
def test_masks_of_batches(is_packed: bool, seed: int) -> None:
    """Each row's bits begin with a byte of its own."""
    rows = StridedRows(LENGTHS, QUERIES, seed=seed)
    masks = rows.masks()
    given = {"packed_custom_mask": packed(masks)[0]}
    if not is_packed:
        given = {"custom_mask": torch.cat([mask.flatten() for mask in masks])}
    name, pages = rows.layouts()["HND"]
    expected = rows.expected(masks)
    close(planned_prefill(rows, name, causal=True, **given).run_return_lse(rows.query, pages), expected)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(rows.qo_indptr, starts(rows), 4, 2, 16, q_data_type=torch.float32, causal=True, **given)
    close(ragged.run_return_lse(rows.query, *rows.ragged), expected)


def test_rows_without_pages_see_nothing(seed: int) -> None:
    rows = StridedRows([3, 0, 5], [1, 1, 1], seed=seed)
    name, pages = rows.layouts()["NHD"]
    for wrapper in (planned_decode(rows, name), planned_prefill(rows, name)):
        out, lse = wrapper.run_return_lse(rows.query, pages)
        assert (out[1] == 0).all()
        assert (lse[1] == -torch.inf).all()
        close((out, lse), rows.expected())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_16_bits_and_fp8(dtype: torch.dtype, kv_dtype: torch.dtype | None, seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, dtype=dtype, kv_dtype=kv_dtype, seed=seed)
    name, pages = rows.layouts()["NHD, two"]
    found = planned_prefill(rows, name).run(rows.query, pages, k_scale=torch.tensor(0.5), v_scale=torch.tensor([2.0]))
    out, _ = rows.expected(scale=0.5 * rows.scale)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), 2 * out, rtol=1e-2, atol=1e-2)
    wrapper = planned_prefill(rows, name, o_data_type="float32")
    assert wrapper.run(rows.query, pages).dtype == torch.float32


def test_scales_of_heads_come_after_the_states(seed: int) -> None:
    """As FlashInfer's kernels for fp8 take them."""
    rows = StridedRows(LENGTHS, [1] * 5, dtype=torch.float8_e4m3fn, seed=seed)
    scales = torch.rand(4), torch.rand(2), torch.rand(2)
    name, pages = rows.layouts()["HND"]
    found = [
        planned(rows, name, o_data_type="float32").run(rows.query, pages, *scales)
        for planned in (planned_decode, planned_prefill)
    ]
    with pytest.raises(TypeError, match="or none of them; got 1"):
        planned_decode(rows, name).run(rows.query, pages, scales[0])
    rows.query = rows.query.float() * (scales[0] * scales[1].repeat_interleave(2))[:, None]
    expected = rows.expected()[0] * scales[2].repeat_interleave(2)[:, None]
    for out in found:
        assert isinstance(out, Tensor)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(rows.qo_indptr, starts(rows), 4, 2, 16, q_data_type=torch.float8_e4m3fn)
    out = ragged.run(rows.query.to(torch.float8_e4m3fn), *rows.ragged)
    assert isinstance(out, Tensor)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_forward_plans_its_logits_anew(kind: str, seed: int) -> None:
    rows = StridedRows(LENGTHS, [1] * 5, seed=seed)
    name, pages = rows.layouts()["NHD"]
    planned: Callable[..., Any] = planned_decode if kind == "decode" else planned_prefill
    wrapper = planned(rows, name, logits_soft_cap=1.0)
    assert wrapper.begin_forward.__func__ is type(wrapper).plan
    close(wrapper.forward_return_lse(rows.query, pages, window_left=2), rows.expected(window_left=2))
    assert torch.equal(wrapper.forward(rows.query, pages, sm_scale=0.3), wrapper.run(rows.query, pages))
    wrapper.end_forward()
    wrapper.reset_workspace_buffer(WORKSPACE, WORKSPACE)


# ---- CUDA graphs: tables have fixed addresses


def test_decode_reads_the_buffers_that_it_was_made_with(seed: int) -> None:
    first, second = (StridedRows(lengths, [1] * 3, seed=seed) for lengths in ([1, 4, 5], [17, 2, 30]))
    buffers = [torch.zeros(size, dtype=torch.int32) for size in (4, 20, 3)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers)
    assert wrapper.is_cuda_graph_enabled
    for rows in (first, second):
        wrapper.plan(*rows.table[1:], 4, 2, 16, 4, q_data_type="float32")
        close(wrapper.run_return_lse(rows.query, rows.layouts()["NHD"][1]), rows.expected())
    indptr, indices, last = first.table[1:]
    for buffer, table in zip(buffers, (indptr, indices, last), strict=True):
        buffer[: len(table)] = table
    close(wrapper.run_return_lse(first.query, first.layouts()["NHD"][1]), first.expected())
    flashinfer.fast_decode_plan(wrapper, *second.table[1:], 4, 2, 16, 4, window_left=1, data_type="float32")
    close(wrapper.run_return_lse(first.query, first.layouts()["NHD"][1]), first.expected(window_left=1))
    held = [buffer.clone() for buffer in buffers]
    too_long = StridedRows([90, 2, 30], [1] * 3)
    with pytest.raises(ValueError, match="paged_kv_indices_buffer has room for 20 entries; got 32"):
        wrapper.plan(*too_long.table[1:], 4, 2, 16, 4)
    with pytest.raises(ValueError, match="always 3, as buffers are; got 2"):
        wrapper.plan(*StridedRows([1, 2], [1, 1]).table[1:], 4, 2, 16, 4)
    assert all(map(torch.equal, buffers, held))


def test_prefill_reads_the_buffers_that_it_was_made_with(seed: int) -> None:
    buffers = [torch.zeros(size, dtype=torch.int32) for size in (4, 4, 20, 3)]
    masks = torch.zeros(60, dtype=torch.uint8), torch.zeros(4, dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers, *masks)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD", True, buffers[0], masks[1])
    for lengths, queries in (([1, 4, 5], [1, 2, 0]), ([17, 2, 30], [3, 1, 1])):
        rows = StridedRows(lengths, queries, seed=seed)
        own = rows.masks()
        flat = torch.cat([mask.flatten() for mask in own])
        wrapper.plan(*rows.table, 4, 2, 16, 4, q_data_type="float32", custom_mask=flat)
        close(wrapper.run_return_lse(rows.query, rows.layouts()["NHD"][1]), rows.expected(own))
        ragged.plan(rows.qo_indptr, starts(rows), 4, 2, 16, q_data_type="float32", causal=True)
        close(ragged.run_return_lse(rows.query, *rows.ragged), rows.expected(causal=True))
    smaller = StridedRows([1, 2], [1, 1])
    with pytest.raises(ValueError, match="always 3, as buffers are; got 2"):
        wrapper.plan(*smaller.table, 4, 2, 16, 4)
    with pytest.raises(ValueError, match="always 3, as buffers are; got 2"):
        ragged.plan(smaller.qo_indptr, starts(smaller), 4, 2, 16)
    with pytest.raises(ValueError, match="custom_mask_buf must be a tensor"):
        ragged.plan(rows.qo_indptr, starts(rows), 4, 2, 16, custom_mask=flat)
    with pytest.raises(ValueError, match="paged_kv_indices_buf must be a tensor with use_cuda_graph=True; got None"):
        flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers[:2])


# ---- pages are written


@pytest.mark.parametrize("layout", LAYOUTS)
def test_append(layout: str, seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, seed=seed)
    name, pages = rows.layouts()[layout]
    written = [pages] if isinstance(pages, Tensor) else list(pages)
    expected = [own.clone() for own in written]
    for own in written:
        own.fill_(torch.nan)
    batch_indices, positions = flashinfer.get_batch_indices_positions(
        starts(rows), flashinfer.get_seq_lens(rows.indptr, rows.last_page_len, 4), sum(LENGTHS)
    )
    table = rows.indices, rows.indptr, rows.last_page_len
    flashinfer.append_paged_kv_cache(*rows.ragged, batch_indices, positions, pages, *table, name)
    for own, exact in zip(written, expected, strict=True):
        torch.testing.assert_close(own, exact, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_and_positions_of_new_tokens(dtype: torch.dtype) -> None:
    indptr, lengths = torch.tensor([0, 2, 2, 5], dtype=dtype), torch.tensor([7, 3, 3], dtype=dtype)
    found = flashinfer.get_batch_indices_positions(indptr, lengths, 7)
    assert found[0].tolist() == [0, 0, 2, 2, 2, -1, -1]
    assert found[1].tolist() == [5, 6, 0, 1, 2, 0, 0]
    given = torch.full((2, 7), 9, dtype=torch.int32)
    again = flashinfer.get_batch_indices_positions(indptr, lengths, 7, *given)
    assert again[0].data_ptr() == given[0].data_ptr()
    assert torch.equal(given, torch.stack(found))
    with pytest.raises(ValueError, match=r"positions must be \(7,\) torch.int32"):
        flashinfer.get_batch_indices_positions(indptr, lengths, 7, positions=given[0].long())


def test_lengths_of_rows() -> None:
    lengths = flashinfer.get_seq_lens(torch.tensor([0, 2, 2, 3]), torch.tensor([3, 0, 4]), 4)
    assert lengths.tolist() == [7, 0, 4]


@pytest.mark.parametrize("bitorder", ["little", "big"])
def test_bits(bitorder: str, seed: int) -> None:
    numpy = pytest.importorskip("numpy")
    rows = [torch.rand(count) < 0.5 for count in (0, 1, 8, 9, 0, 31)]
    indptr = torch.tensor([0, *map(len, rows)]).cumsum(0).int()
    found, begins = flashinfer.segment_packbits(torch.cat(rows), indptr, bitorder)
    expected = [numpy.packbits(row.numpy(), bitorder=bitorder) for row in rows]
    assert found.tolist() == numpy.concatenate(expected).tolist()
    assert begins.tolist() == [0, *numpy.cumsum([len(row) for row in expected])]
    assert flashinfer.packbits(rows[-1], bitorder).tolist() == expected[-1].tolist()
    with pytest.raises(ValueError, match="bitorder='middle'"):
        flashinfer.packbits(rows[0], "middle")


# ---- merges


def test_merges_are_attention_over_all_keys(seed: int) -> None:
    rows = StridedRows([30], [3], seed=seed)
    keys, values = rows.ragged
    parts = [
        flashinfer.single_prefill_with_kv_cache_return_lse(rows.query, keys[own], values[own])
        for own in (slice(0, 7), slice(7, 20), slice(20, 30))
    ]
    expected = dense(rows.query, keys, values, rows.scale)
    close(flashinfer.merge_state(*flashinfer.merge_state(*parts[0], *parts[1]), *parts[2]), expected)
    stacked = [torch.stack(own, 1) for own in zip(*parts, strict=True)]
    close(flashinfer.merge_states(*stacked), expected)
    out, lse = (own.clone() for own in parts[0])
    flashinfer.merge_state_in_place(out, lse, *parts[1])
    flashinfer.merge_state_in_place(out, lse, *parts[2], mask=torch.tensor([True, True, False]))
    close((out[:2], lse[:2]), (expected[0][:2], expected[1][:2]))
    first_two = dense(rows.query[2:], keys[:20], values[:20], rows.scale)
    close((out[2:], lse[2:]), first_two)


# ---- torch.compile


BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.whole)])
"""What Inductor makes of a step that appends and attends is tested in each run, below."""


@BACKENDS
def test_single_functions_compile_whole_and_once_for_all_lengths(backend: str, seed: int) -> None:
    def layer(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        out, lse = flashinfer.single_prefill_with_kv_cache(query + 1, keys, values, causal=True, return_lse=True)
        newest = flashinfer.single_decode_with_kv_cache(query[-1] * 2, keys, values, pos_encoding_mode="ROPE_LLAMA")
        biased = flashinfer.single_decode_with_kv_cache(query[-1], keys, values, pos_encoding_mode="ALIBI")
        return out * 2, lse, newest, biased

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for number, (length, queries) in enumerate([(33, 7), (20, 3), (9, 9)]):
        rows = StridedRows([length], [queries], seed=seed + number)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = compiled(rows.query, *rows.ragged)
        torch.testing.assert_close(found, layer(rows.query, *rows.ragged))


@pytest.mark.drawn(most=1)
@BACKENDS
@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged"])
def test_planned_wrappers_compile_whole_and_once_for_all_batches(kind: str, backend: str, seed: int) -> None:
    """With the buffers of CUDA graphs, plans change nothing that a graph depends on."""
    buffers = [torch.zeros(size, dtype=torch.int32) for size in (5, 5, 40, 4)]
    if kind == "decode":
        wrapper: Any = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, *buffers[1:])
    elif kind == "prefill":
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers)
    else:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers[:2])

    def step(query: Tensor, *states: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = wrapper.run(query * 2, *states, return_lse=True)
        return out + 1, lse

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=backend)
    for number, (lengths, counts) in enumerate([([9, 6, 4, 3], [3, 6, 2, 1]), ([30, 2, 2, 7], [1, 2, 1, 3])]):
        queries = [1] * 4 if kind == "decode" else counts
        rows = StridedRows(lengths, queries, seed=seed + number)
        options: dict[str, Any] = {"q_data_type": "float32", "pos_encoding_mode": "ROPE_LLAMA"}
        states = [rows.layouts()["NHD"][1]] if kind != "ragged" else list(rows.ragged)
        if kind == "ragged":
            wrapper.plan(rows.qo_indptr, starts(rows), 4, 2, 16, causal=True, **options)
        else:
            table = rows.table[1:] if kind == "decode" else rows.table
            wrapper.plan(*table, 4, 2, 16, 4, **options)
        with torch.compiler.set_stance("fail_on_recompile" if number else "default"):
            found = compiled(rows.query, *states)
        torch.testing.assert_close(found, step(rows.query, *states))


def test_a_step_that_appends_and_attends_compiles_whole(seed: int) -> None:
    rows = StridedRows([9, 6, 4], [1] * 3, seed=seed)
    name, pages = rows.layouts()["NHD"]
    wrapper = planned_decode(rows, name)
    newest = [torch.stack([own[-1] for own in states]) for states in (rows.keys, rows.values)]

    def step(query: Tensor, key: Tensor, value: Tensor, pages: Tensor) -> Tensor:
        lengths = flashinfer.get_seq_lens(*rows.table[1::2], 4)
        places = flashinfer.get_batch_indices_positions(torch.arange(4), lengths, 3)
        table = rows.indices, rows.indptr, rows.last_page_len
        flashinfer.append_paged_kv_cache(key * 2, value, *places, pages, *table)
        out = wrapper.run(query, pages)
        assert isinstance(out, Tensor)
        return out

    other = pages.clone()
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(rows.query, *newest, pages)
    torch.testing.assert_close(found, step(rows.query, *newest, other))
    torch.testing.assert_close(pages, other, equal_nan=True)


# ---- what is left out, and what does not fit


def calls() -> dict[str, Callable[..., Any]]:
    """What takes arguments that are left out, by name, with all others given."""
    rows = StridedRows(LENGTHS, QUERIES)
    name, pages = rows.layouts()["NHD"]
    decode, prefill = planned_decode(rows, name), planned_prefill(rows, name)
    ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    ragged.plan(rows.qo_indptr, starts(rows), 4, 2, 16, q_data_type="float32")
    out = torch.full_like(rows.query, 7.0)
    decoded = torch.full((5, 4, 16), 7.0)
    latents = LatentPools()
    mla = flashinfer.BatchMLAPagedAttentionWrapper(WORKSPACE)
    mla.plan(*latents.plan(causal=False))

    def bound(function: Callable[..., Any], *given: Any) -> Callable[..., Any]:
        return lambda **left_out: function(*given, **left_out)

    results = {"out": out}
    return {
        "single prefill": bound(flashinfer.single_prefill_with_kv_cache, rows.query, *rows.ragged),
        "decode": bound(flashinfer.BatchDecodeWithPagedKVCacheWrapper, WORKSPACE),
        "prefill": bound(flashinfer.BatchPrefillWithPagedKVCacheWrapper, WORKSPACE),
        "ragged": bound(flashinfer.BatchPrefillWithRaggedKVCacheWrapper, WORKSPACE),
        "sparse": bound(flashinfer.BlockSparseAttentionWrapper, WORKSPACE),
        "variable": bound(flashinfer.VariableBlockSparseAttentionWrapper, WORKSPACE),
        "mla": bound(flashinfer.BatchMLAPagedAttentionWrapper, WORKSPACE),
        "mla.plan": bound(mla.plan, *latents.plan(causal=False)),
        "mla.run": bound(mla.run, *latents.parts),
        "decode.plan": bound(decode.plan, *rows.table[1:], 4, 2, 16, 4),
        "prefill.plan": bound(prefill.plan, *rows.table, 4, 2, 16, 4),
        "ragged.plan": bound(ragged.plan, rows.qo_indptr, starts(rows), 4, 2, 16),
        "decode.run": lambda **left_out: decode.run(rows.query[:5], pages, out=decoded, **left_out),
        "prefill.run": lambda **left_out: prefill.run(rows.query, pages, **results, **left_out),
        "ragged.run": lambda **left_out: ragged.run(rows.query, *rows.ragged, **results, **left_out),
    }


TAKERS = {
    "single prefill": flashinfer.single_prefill_with_kv_cache,
    **{
        f"{name}{suffix}": getattr(kind, method)
        for name, kind in (
            ("decode", flashinfer.BatchDecodeWithPagedKVCacheWrapper),
            ("prefill", flashinfer.BatchPrefillWithPagedKVCacheWrapper),
            ("ragged", flashinfer.BatchPrefillWithRaggedKVCacheWrapper),
            ("mla", flashinfer.BatchMLAPagedAttentionWrapper),
            ("sparse", flashinfer.BlockSparseAttentionWrapper),
            ("variable", flashinfer.VariableBlockSparseAttentionWrapper),
        )
        for method, suffix in (("__init__", ""), ("plan", ".plan"), ("run", ".run"))
    },
}
"""What `calls` calls, for its arguments."""
REFUSED = [
    (taker, name)
    for taker, function in TAKERS.items()
    for name in inspect.signature(function).parameters
    if name in LEFT_OUT
]


def test_each_argument_that_is_left_out_is_one_of_a_function() -> None:
    assert {name for _, name in REFUSED} == LEFT_OUT.keys()


def test_the_page_says_what_is_left_out_and_what_is_there() -> None:
    page = (CHECKOUT / "docs" / "how-to" / "flashinfer_api.md").read_text()
    there, left_out = page.split("## What is left out")
    for name in LEFT_OUT:
        assert re.search(rf"`{name}[`=]", left_out), name
    for name in flashinfer.__all__:
        assert f"`{name}`" in there or inspect.ismodule(getattr(flashinfer, name)), name


@pytest.mark.parametrize(("taker", "name"), REFUSED, ids=str)
def test_what_is_left_out_is_refused_by_name_with_a_way_out(taker: str, name: str) -> None:
    value: Any = {"backend": "cudnn", "jit_args": ["x"], "use_profiler": True}.get(name, torch.zeros(3))
    shown = r"tensor of \(3,\)" if isinstance(value, Tensor) else repr(value).replace("[", r"\[")
    with pytest.raises(NotImplementedError, match=f"{name}={shown} is left out of this API; .{{10,}}"):
        calls()[taker](**{name: value})


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "DHN"), KeyError, "kv_layout='DHN'"),
        (
            lambda: flashinfer.single_decode_with_kv_cache(*torch.zeros(3, 2, 2, 4), pos_encoding_mode="NOPE"),
            ValueError,
            r"q must be \[H, D\]; got \(2, 2, 4\)",
        ),
        (
            lambda: flashinfer.single_decode_with_kv_cache(
                torch.zeros(2, 4), *torch.zeros(2, 2, 2, 4), pos_encoding_mode="NOPE"
            ),
            KeyError,
            "pos_encoding_mode='NOPE' does not exist",
        ),
        (
            lambda: flashinfer.single_prefill_with_kv_cache(
                *torch.zeros(3, 5, 2, 4), custom_mask=torch.zeros(5, 4, dtype=torch.bool)
            ),
            ValueError,
            r"custom_mask must be \[5, 5\], queries and keys; got \(5, 4\)",
        ),
        (
            lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE).run(*torch.zeros(2, 1)),
            RuntimeError,
            r"call plan\(\) before run\(\)",
        ),
        (
            lambda: flashinfer.append_paged_kv_cache(*torch.zeros(4, 1, 1, 1), {}, *torch.zeros(3, 1).int()),
            KeyError,
            "must be a tensor or a tuple of two; got dict",
        ),
    ],
)  # fmt: skip
def test_what_does_not_exist_or_fit_is_refused(call: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"q": torch.zeros(11, 4, 16).half()}, "q must be torch.float32, as planned; got torch.float16"),
        ({"q": torch.zeros(12, 4, 16)}, r"q must have 11 tokens, as planned with qo_indptr; got \(12, 4, 16\)"),
        ({"window_left": 3}, "window_left must be -1, as planned; got 3"),
        ({"out": torch.zeros(11, 4, 8)}, r"out must be \(11, 4, 16\) torch.float32 on cpu"),
        ({"lse": torch.zeros(11, 4).half()}, r"lse must be \(11, 4\) torch.float32 on cpu"),
        ({"k_scale": torch.zeros(3)}, "k_scale must be a number, or one for each head"),
        ({"paged_kv_cache": torch.zeros(9, 3, 4, 2, 16)}, r"must be \[P, 2, ...\], keys and values"),
        ({"paged_kv_cache": torch.zeros(9, 2)}, "must have 5 axes, or 4 for a page size of 1"),
    ],
)
def test_what_is_not_as_planned_is_refused_before_anything_is_written(changed: dict[str, Any], said: str) -> None:
    rows = StridedRows(LENGTHS, QUERIES)
    name, pages = rows.layouts()["NHD"]
    out = torch.full_like(rows.query, 7.0)
    given = {"q": rows.query, "paged_kv_cache": pages, "out": out, **changed}
    with pytest.raises(ValueError, match=said):
        planned_prefill(rows, name).run(**given)
    assert (out == 7).all()


def test_plans_that_do_not_fit_are_refused() -> None:
    rows = StridedRows(LENGTHS, QUERIES)
    wrapper = planned_prefill(rows, "NHD")
    table = rows.qo_indptr, rows.indptr[:-1], *rows.table[2:]
    with pytest.raises(ValueError, match=r"paged_kv_indptr must be \[6\] for 5 rows; got \[5\]"):
        wrapper.plan(*table, 4, 2, 16, 4)
    with pytest.raises(ValueError, match="custom_mask must have"):
        wrapper.plan(*rows.table, 4, 2, 16, 4, custom_mask=torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="packed_custom_mask must be"):
        wrapper.plan(*rows.table, 4, 2, 16, 4, packed_custom_mask=torch.zeros(3, dtype=torch.uint8))


def test_a_run_that_says_its_queries_is_deprecated(seed: int) -> None:
    rows = StridedRows([4, 5], [2, 2], seed=seed)
    name, pages = rows.layouts()["NHD"]
    wrapper = planned_decode(rows, name)
    with pytest.warns(DeprecationWarning, match="give it to plan"):
        wrapper.run(rows.query, pages, q_len_per_req=2)
    with pytest.warns(DeprecationWarning, match="plan"), pytest.raises(ValueError, match=r"2 \* 3 queries"):
        wrapper.run(rows.query, pages, q_len_per_req=3)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 71])
def test_slopes_of_alibi(heads: int) -> None:
    """Those of the paper: of a power of two, and every second one of the next power for the rest."""

    def of_a_power(count: int) -> list[float]:
        return [2 ** (-8 * (head + 1) / count) for head in range(count)]

    whole = 2 ** (heads.bit_length() - 1)
    expected = (of_a_power(whole) + of_a_power(2 * whole)[::2])[:heads]
    torch.testing.assert_close(alibi_slopes(heads, torch.device("cpu")), torch.tensor(expected))
