"""The kernels of FlashInfer's API under Triton's interpreter; on a GPU see `test_flashinfer_api_gpu.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm_ops.contracts import StridedAppend, StridedAttention
from support.ops.interpreting import check_interpreted, interpreted, needs_triton, not_interpreted
from support.ops.strided_rows import StridedRows, packed

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

LENGTHS, QUERIES = [1, 16, 17, 40, 0, 33], [1, 16, 2, 21, 3, 0]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def attend(
    rows: StridedRows, keys: Tensor, values: Tensor, table: Any, parts: int, **how: Any
) -> tuple[Tensor, Tensor]:
    from compiled_llm_ops.kernels.attention.packed_tiling import PackedTiling
    from compiled_llm_ops.kernels.strided.attention import attend as launch

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
    from compiled_llm_ops.flashinfer_api.layouts import paged

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
    from compiled_llm_ops.kernels.strided.append import append

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


@not_interpreted
def test_under_the_interpreter(pytestconfig: pytest.Config) -> None:
    check_interpreted("ops/flashinfer_api/test_triton_strided.py", pytestconfig)
