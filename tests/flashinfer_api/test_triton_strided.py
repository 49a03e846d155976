"""The kernels of FlashInfer's API under Triton's interpreter; on a GPU see `test_flashinfer_api_gpu.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_flashinfer.ops.contracts import StridedAppend, StridedAttention
from support.flashinfer_api.strided_rows import StridedRows, packed
from support.ops.compiling import compiled, resources_of
from support.ops.interpreting import interpreted, needs_triton, not_interpreted

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

LENGTHS, QUERIES = [1, 16, 17, 40, 0, 33], [1, 16, 2, 21, 3, 0]
SHARED_MEMORY = 228 * 1024
"""Bytes of an H100's multiprocessor."""
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def attend(
    rows: StridedRows, keys: Tensor, values: Tensor, table: Any, parts: int, **how: Any
) -> tuple[Tensor, Tensor]:
    from compiled_llm_flashinfer.ops.kernels.strided.attention import attend as launch
    from compiled_llm_ops.kernels.attention.packed_tiling import PackedTiling

    shape = (*rows.query.shape[:2], values.shape[3])
    out, lse = torch.full(shape, torch.nan).to(rows.query.dtype), torch.full(shape[:2], torch.nan)
    args = StridedAttention(rows.query, keys, values, out, lse, *table, rows.scale, **how)
    launch(args, PackedTiling(16, 16, 1, 4), parts)
    return out, lse


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    near = 1e-5 if found[0].dtype == torch.float32 else 5e-3
    for own, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), exact, rtol=near, atol=near)


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("how", "rope"),
    [
        ({}, None),
        ({"causal": True, "window_left": 15}, None),
        ({"causal": True, "logits_soft_cap": 1.5}, None),
        ({"window_left": 3, "slopes": SLOPES}, None),
        ({"causal": True, "slopes": SLOPES, "logits_soft_cap": 3.0}, None),
        ({"causal": True}, (1.0, 1e4)),
        ({"window_left": 20}, (2.0, 1e3)),
    ],
    ids=str,
)
def test_positions(how: dict[str, Any], rope: tuple[float, float] | None, parts: int, seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, page_size=5, seed=seed)
    rotation = {} if rope is None else {"rope_scale": rope[0], "rope_theta": rope[1]}
    found = attend(rows, *rows.pools, rows.table, parts, **how, **rotation)
    check(found, rows.expected(**how, rope=rope))


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.float16, None), (torch.float16, torch.float8_e4m3fn)], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (24, 16), (64, 80)])
@pytest.mark.parametrize("heads", [2, 10])
def test_heads(
    heads: int, head_dim: int, value_dim: int, dtype: torch.dtype, kv_dtype: torch.dtype | None, seed: int
) -> None:
    sizes: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "value_dim": value_dim}
    rows = StridedRows(LENGTHS, QUERIES, **sizes, dtype=dtype, kv_dtype=kv_dtype, seed=seed)
    check(attend(rows, *rows.pools, rows.table, 2, causal=True), rows.expected(causal=True))


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("layout", ["HND", "NHD", "NHD, two", "strided", "transposed"])
def test_layouts(layout: str, seed: int) -> None:
    from compiled_llm_flashinfer.layouts import paged

    rows = StridedRows(LENGTHS, QUERIES, seed=seed)
    name, pages = rows.layouts()[layout]
    check(attend(rows, *paged(pages, name), rows.table, 1), rows.expected())


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("parts", [1, 2])
def test_masks_factors_and_rows_without_pages(parts: int, seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, page_size=1, seed=seed)
    masks, factors = rows.masks(), torch.rand(2, 4)
    mask, mask_indptr = packed(masks)
    keys, values = (states.unsqueeze(2) for states in rows.ragged)
    table = (rows.qo_indptr, rows.indptr.long(), None, None)
    how: dict[str, Any] = {"logit_factors": factors[0], "value_factors": factors[1], "value_scale": 0.5}
    found = attend(rows, keys, values, table, parts, mask=mask, mask_indptr=mask_indptr, causal=True, **how)
    rows.query = rows.query * factors[0][:, None]
    out, lse = rows.expected(masks)
    check(found, (out * factors[1][:, None] * 0.5, lse))


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize(("length", "queries"), [(1, 1), (17, 5), (3, 7), (130, 1)])
def test_one_row_and_equal_rows(length: int, queries: int, seed: int) -> None:
    rows = StridedRows([length], [queries], seed=seed)
    keys, values = (states.transpose(0, 1)[None] for states in rows.ragged)
    check(attend(rows, keys, values, (None,) * 4, 3, causal=True), rows.expected(causal=True))
    rows = StridedRows([length, 9], [queries, queries], seed=seed)
    check(attend(rows, *rows.pools, (None, *rows.table[1:]), 1), rows.expected())


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_append(dtype: torch.dtype, seed: int) -> None:
    from compiled_llm_flashinfer.ops.kernels.strided.append import append

    rows = StridedRows(LENGTHS, QUERIES, head_dim=16, value_dim=8, dtype=dtype, seed=seed)
    keys, values = (torch.full_like(pool, torch.nan).transpose(1, 2).contiguous() for pool in rows.pools)
    token_rows = torch.tensor([-1] + [row for row, length in enumerate(LENGTHS) for _ in range(length)])
    positions = torch.tensor([0] + [position for length in LENGTHS for position in range(length)])
    padded = [torch.cat([states[:1], states]) for states in rows.ragged]
    if dtype == torch.float8_e4m3fn:
        padded = [states.float() for states in padded]
    pools = keys.transpose(1, 2), values.transpose(1, 2)
    append(StridedAppend(*padded, *pools, token_rows, positions, rows.indptr, rows.indices))
    for pool, written in zip(rows.pools, pools, strict=True):
        torch.testing.assert_close(written.float(), pool.float(), equal_nan=True, rtol=0, atol=0)


# ---- compiled, without a GPU


TABLES = ("qo_indptr", "indptr", "indices", "last_page_len", "mask_indptr")
STRIDES = [f"{name}_{axis}" for name in ("query", "out", "lse") for axis in ("row", "head")]
STRIDES += [f"{name}_{axis}" for name in ("keys", "values") for axis in ("page", "head", "slot")]


@pytest.mark.drawn(most=1)
@not_interpreted
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("kind", "query", "pages", "head_dim", "value_dim", "gqa", "row_queries"),
    [
        ("plain", "bf16", "bf16", 128, 128, 4, 1),
        ("plain", "bf16", "bf16", 128, 128, 4, 1000),
        ("plain", "fp16", "fp16", 64, 64, 3, 1000),
        ("plain", "fp16", "fp8e4nv", 128, 128, 1, 1),
        ("plain", "bf16", "fp8e5", 256, 256, 8, 1000),
        ("plain", "bf16", "bf16", 192, 128, 1, 1000),
        ("plain", "fp16", "fp16", 512, 512, 5, 1000),
        ("plain", "fp32", "fp32", 128, 128, 4, 1000),
        ("one row", "fp16", "fp16", 128, 128, 4, 1),
        ("everything", "bf16", "bf16", 128, 128, 4, 1),
        pytest.param("everything", "bf16", "fp8e4nv", 64, 64, 1, 1000, marks=pytest.mark.whole),
        ("everything", "fp32", "fp32", 64, 64, 3, 1000),
    ],
)
def test_it_compiles_for_hopper(
    kind: str, query: str, pages: str, head_dim: int, value_dim: int, gqa: int, row_queries: int, tmp_path: Path
) -> None:
    from compiled_llm_flashinfer.ops.kernels.strided.attention import _strided_attention as kernel, strided_tiling

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    dtypes |= {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    whole = kind == "everything"
    states = (
        torch.empty(-(-row_queries // gqa), gqa, head_dim, dtype=dtypes[query]),
        *(torch.empty(1, 1, 1, size, dtype=dtypes[pages]) for size in (head_dim, value_dim)),
    )
    unread = torch.empty(0), None, None, None, None, None
    rotation = {"rope_scale": 1.0, "rope_theta": 1e4} if whole else {}
    tiling = strided_tiling(StridedAttention(*states, *unread, 1.0, **rotation), SHARED_MEMORY)
    types = {"query": f"*{query}", "out": f"*{query}", "lse": "*fp32"}
    types |= dict.fromkeys(("keys", "values"), f"*{pages}")
    if kind != "one row":
        types |= dict.fromkeys(TABLES[:-1], "*i32")
    if whole:
        types |= {"mask": "*u8", "mask_indptr": "*i64"}
        types |= dict.fromkeys(("slopes", "logit_factors", "value_factors"), "*fp32")
    types |= dict.fromkeys([*STRIDES, "out_part", "lse_part", "rows", "tokens", "all_keys", "window_left"], "i32")
    types |= dict.fromkeys(("scale", "slope_scale", "cap", "value_scale", "rope_scale", "log_theta"), "fp32")
    constants = {
        "QUERIES": tiling.queries, "GQA": gqa, "HEAD": head_dim, "DIM": 1 << (head_dim - 1).bit_length(),
        "VALUE": value_dim, "VALUE_DIM": 1 << (value_dim - 1).bit_length(), "PAGE": 16, "KEYS": tiling.keys,
        "STAGES": tiling.stages, "CAUSAL": not whole, "CAPPED": whole, "ROTATED": whole, "CLAMPED": False,
    }  # fmt: skip
    made = compiled(kernel, constants, types, tiling.warps, ("query", "keys", "values", "out", *STRIDES))
    (stack,) = re.findall(r"STACK:(\d+)", resources_of(made.asm["cubin"], tmp_path / "cubin"))
    assert int(stack) <= 128, "registers spill"
    assert made.metadata.shared <= SHARED_MEMORY - 1024
    assert "tf32" not in made.asm["ptx"] or query != "fp32"


@not_interpreted
@pytest.mark.usefixtures("own_cache")
def test_append_compiles_for_hopper() -> None:
    from compiled_llm_flashinfer.ops.kernels.strided.append import _strided_append as kernel

    types = dict.fromkeys(("key", "value"), "*bf16") | dict.fromkeys(("keys", "values"), "*fp8e4nv")
    types |= dict.fromkeys(("token_rows", "token_positions", "indptr", "indices"), "*i32")
    types |= {name: "i32" for name in kernel.arg_names if "_" in name and name not in types}
    compiled(kernel, {"PAGE": 16, "HEAD": 80, "VALUE": 64, "WIDE": 128}, types, 1)
