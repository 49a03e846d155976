"""FlashInfer's API on a GPU: against dense attention, beside FlashInfer itself call by call, captured and compiled."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import compiled_llm_flashinfer as ours
from compiled_llm_flashinfer.arguments import alibi_slopes
from support.flashinfer_api.strided_rows import StridedRows, starts_of
from support.gpu import needs_cuda, seeded

pytestmark = [pytest.mark.gpu, needs_cuda, seeded]

LENGTHS, QUERIES = [1, 16, 17, 200, 1000, 33], [1, 3, 17, 40, 1, 0]
NEAR = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 20},
    "cap": {"logits_soft_cap": 8.0},
    "ROPE_LLAMA": {"pos_encoding_mode": "ROPE_LLAMA"},
    "ALIBI": {"pos_encoding_mode": "ALIBI"},
}
needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is missing")


def workspace() -> Tensor:
    return torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")


def as_dense(how: dict[str, Any], heads: int) -> dict[str, Any]:
    own = dict(how)
    mode = own.pop("pos_encoding_mode", "NONE")
    if mode == "ROPE_LLAMA":
        own["rope"] = 1.0, 1e4
    if mode == "ALIBI":
        own["slopes"] = alibi_slopes(heads, torch.device("cpu"))
    return own


def rows_of(queries: list[int], dtype: torch.dtype, seed: int, **sizes: Any) -> StridedRows:
    return StridedRows(LENGTHS, queries, **{"head_dim": 64, "page_size": 16, "seed": seed, **sizes}, dtype=dtype)


def on_gpu(given: Any) -> Any:
    return given.cuda() if isinstance(given, Tensor) else tuple(own.cuda() for own in given)


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype, rotated: bool = False) -> None:
    """Angles of far positions are not exact in float32."""
    near = max(NEAR[dtype], 1e-3) if rotated else NEAR[dtype]
    for own, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(own.cpu().double(), exact.cpu().double(), rtol=near, atol=near)


# ---- against dense attention


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("layout", ["NHD", "HND", "NHD, two", "strided"])
def test_pages(layout: str, how: dict[str, Any], dtype: torch.dtype, seed: int) -> None:
    rows = rows_of(QUERIES, dtype, seed)
    name, pages = rows.layouts()[layout]
    wrapper = ours.BatchPrefillWithPagedKVCacheWrapper(workspace(), name)
    wrapper.plan(*rows.table, 4, 2, 64, 16, causal=True, q_data_type=dtype, **how)
    close(
        wrapper.run_return_lse(rows.query.cuda(), on_gpu(pages)),
        rows.expected(causal=True, **as_dense(how, 4)),
        dtype,
        "pos_encoding_mode" in how,
    )
    newest = rows_of([1] * len(LENGTHS), dtype, seed)
    decode = ours.BatchDecodeWithPagedKVCacheWrapper(workspace(), name)
    decode.plan(*newest.table[1:], 4, 2, 64, 16, q_data_type=dtype, **how)
    found = decode.run_return_lse(newest.query.cuda(), on_gpu(newest.layouts()[layout][1]))
    close(found, newest.expected(**as_dense(how, 4)), dtype, "pos_encoding_mode" in how)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_fp8(dtype: torch.dtype, kv_dtype: torch.dtype, seed: int) -> None:
    rows = rows_of(QUERIES, dtype, seed, kv_dtype=kv_dtype)
    wrapper = ours.BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD")
    wrapper.plan(*rows.table, 4, 2, 64, 16, q_data_type=dtype, kv_data_type=kv_dtype)
    found = wrapper.run(rows.query.cuda(), on_gpu(rows.layouts()["NHD"][1]), k_scale=0.5, v_scale=2.0)
    out, _ = rows.expected(scale=0.5 * rows.scale)
    close((found / 2,), (out,), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (80, 80), (256, 256), (512, 512)])
@pytest.mark.parametrize("heads", [2, 14, 142])
def test_heads_without_pages(heads: int, head_dim: int, value_dim: int, dtype: torch.dtype, seed: int) -> None:
    rows = rows_of(QUERIES, dtype, seed, head_dim=head_dim, value_dim=value_dim, heads=heads, page_size=1)
    wrapper = ours.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    masks = rows.masks()
    flat = torch.cat([mask.flatten() for mask in masks])
    wrapper.plan(
        rows.qo_indptr, rows.indptr, heads, 2, head_dim, value_dim, q_data_type=dtype, custom_mask=flat.cuda()
    )  # fmt: skip
    close(wrapper.run_return_lse(rows.query.cuda(), *map(on_gpu, rows.ragged)), rows.expected(masks), dtype)


@pytest.mark.parametrize("length", [1, 300, 20_000])
def test_long_rows_are_shared_by_programs(length: int, seed: int) -> None:
    rows = StridedRows([length], [1], head_dim=128, heads=8, dtype=torch.float32, page_size=1, seed=seed)
    found = ours.single_decode_with_kv_cache(rows.query[0].cuda(), *map(on_gpu, rows.ragged), return_lse=True)
    out, lse = rows.expected()
    close(found, (out[0], lse[0]), torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["NHD", "HND", "NHD, two", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_append(dtype: torch.dtype, layout: str, seed: int) -> None:
    rows = rows_of(QUERIES, dtype, seed)
    name, pages = rows.layouts()[layout]
    whole = on_gpu(pages)
    written = [whole] if isinstance(whole, Tensor) else list(whole)
    expected = [own.float() for own in written]
    for own in written:
        own.copy_(torch.full_like(own, torch.nan, dtype=torch.float32).to(dtype))
    lengths = ours.get_seq_lens(rows.indptr, rows.last_page_len, 16).cuda()
    places = ours.get_batch_indices_positions(starts_of(LENGTHS).cuda(), lengths, sum(LENGTHS))
    table = (rows.indices.cuda(), rows.indptr.cuda(), rows.last_page_len.cuda())
    ours.append_paged_kv_cache(*map(on_gpu, rows.ragged), *places, whole, *table, name)
    for own, exact in zip(written, expected, strict=True):
        torch.testing.assert_close(own.float(), exact, equal_nan=True, rtol=0, atol=0)


def test_without_split_rows_a_batch_changes_no_bits(seed: int) -> None:
    rows = rows_of([1, 3, 17, 40, 1, 2], torch.bfloat16, seed)
    pages, begin = rows.layouts()["NHD"][1].cuda(), 0
    wrapper = ours.BatchPrefillWithPagedKVCacheWrapper(workspace())
    how: dict[str, Any] = {"causal": True, "window_left": 30, "q_data_type": torch.bfloat16, "disable_split_kv": True}
    wrapper.plan(*rows.table, 4, 2, 64, 16, **how)
    whole = wrapper.run(rows.query.cuda(), pages)
    for row, count in enumerate(rows.counts):
        own = rows.indices[rows.indptr[row] : rows.indptr[row + 1]]
        table = starts_of([count]), starts_of([len(own)]), own, rows.last_page_len[row : row + 1]
        wrapper.plan(*table, 4, 2, 64, 16, **how)
        alone = wrapper.run(rows.query[begin : begin + count].cuda(), pages)
        assert torch.equal(alone, whole[begin : begin + count]), row
        begin += count


# ---- beside FlashInfer


@needs_flashinfer
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_as_flashinfer(kv_layout: str, how: dict[str, Any], seed: int) -> None:
    """The same calls of both modules; ALiBi's slopes, offsets of its log-sum-exps and rotations included."""
    import flashinfer

    queries = [min(count, length) for count, length in zip([1, 3, 17, 40, 1, 2], LENGTHS, strict=True)]
    rows = rows_of(queries, torch.float16, seed)
    newest = rows_of([1] * len(LENGTHS), torch.float16, seed)
    pages = rows.layouts()[kv_layout][1].nan_to_num(0.0).cuda()
    keys, values = (own if kv_layout == "NHD" else own.transpose(0, 1).contiguous() for own in rows.ragged)
    states = keys.cuda(), values.cuda()
    table = [column.cuda() for column in rows.table]

    def single_decode(module: Any) -> Any:
        return module.single_decode_with_kv_cache(newest.query[0].cuda(), *states, kv_layout, **how, return_lse=True)

    def single_prefill(module: Any) -> Any:
        query = rows.query.cuda()
        return module.single_prefill_with_kv_cache(
            query, *states, causal=True, kv_layout=kv_layout, **how, backend="fa2", return_lse=True
        )

    def decode(module: Any) -> Any:
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(workspace(), kv_layout)
        wrapper.plan(*table[1:], 4, 2, 64, 16, **how, q_data_type=torch.float16)
        return wrapper.run(newest.query.cuda(), pages, k_scale=0.5, v_scale=2.0, return_lse=True)

    def prefill(module: Any) -> Any:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace(), kv_layout, backend="fa2")
        wrapper.plan(*table, 4, 2, 64, 16, causal=True, **how, q_data_type=torch.float16)
        return wrapper.run(rows.query.cuda(), pages, return_lse=True)

    def ragged(module: Any) -> Any:
        wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", backend="fa2")
        wrapper.plan(table[0], starts_of(LENGTHS).cuda(), 4, 2, 64, causal=True, **how, q_data_type=torch.float16)
        return wrapper.run(rows.query.cuda(), *map(on_gpu, rows.ragged), return_lse=True)

    calls: list[Callable[[Any], Any]] = [single_decode, single_prefill, decode, prefill, ragged]
    for call in calls:
        found, theirs = call(ours), call(flashinfer)
        for own, other in zip(found, theirs, strict=True):
            torch.testing.assert_close(
                own, other, rtol=1e-2, atol=1e-2, msg=lambda said, name=call.__name__: name + said
            )


@needs_flashinfer
def test_masks_bits_and_places_as_flashinfer(seed: int) -> None:
    import flashinfer

    rows = rows_of(QUERIES, torch.float16, seed)
    flat = torch.cat([mask.flatten() for mask in rows.masks()]).cuda()
    counts = [count * length for count, length in zip(QUERIES, LENGTHS, strict=True)]
    for own, other in zip(
        ours.segment_packbits(flat, starts_of(counts).cuda(), "little"),
        flashinfer.segment_packbits(flat, starts_of(counts).cuda(), "little"),
        strict=True,
    ):
        assert torch.equal(own, other)
    given = (starts_of([3, 0, 2]).cuda(), torch.tensor([7, 3, 2], device="cuda").int(), 5)
    for own, other in zip(
        ours.get_batch_indices_positions(*given), flashinfer.get_batch_indices_positions(*given), strict=True
    ):
        assert torch.equal(own, other)


# ---- captured, and compiled


def test_a_captured_run_follows_plans(seed: int) -> None:
    buffers = [torch.zeros(size, dtype=torch.int32, device="cuda") for size in (7, 200, 6)]
    wrapper = ours.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(), *buffers)
    first = rows_of([1] * 6, torch.float16, seed)
    pages = torch.zeros(220, 2, 16, 2, 64, dtype=torch.float16, device="cuda")
    query = first.query.cuda()

    def plan(rows: StridedRows) -> None:
        pages[: len(rows.pools[0])] = rows.layouts()["NHD"][1].cuda()
        query.copy_(rows.query)
        wrapper.plan(*rows.table[1:], 4, 2, 64, 16, q_data_type=torch.float16)

    plan(first)
    wrapper.run_return_lse(query, pages)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = wrapper.run_return_lse(query, pages)
    for number, lengths in enumerate([[5, 900, 1, 16, 17, 32], [300, 300, 300, 300, 300, 300]]):
        rows = StridedRows(
            lengths, [1] * 6, head_dim=64, page_size=16, dtype=torch.float16, seed=seed + number
        )  # fmt: skip
        plan(rows)
        graph.replay()
        close(found, rows.expected(), torch.float16)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str, seed: int) -> None:
    rows = StridedRows([256], [1], head_dim=128, heads=8, kv_heads=8, dtype=torch.float16, seed=seed)
    given = rows.query[0].cuda(), *map(on_gpu, rows.ragged)
    compiled = torch.compile(ours.single_decode_with_kv_cache, mode=mode, fullgraph=True)
    for _ in range(3):
        found = compiled(*given)
        assert isinstance(found, Tensor)
        close((found,), (rows.expected()[0][0],), torch.float16)
