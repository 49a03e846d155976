"""The ops under FlashInfer's API, on the CPU, against dense attention; `test_triton_strided.py` has the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_llm_flashinfer.ops import strided_append, strided_attention
from support.flashinfer_api.strided_rows import StridedRows, packed

LENGTHS, QUERIES = [1, 4, 5, 17, 0, 9], [1, 4, 2, 3, 2, 0]
"""One token, a full page, one more; a row without keys, and one without queries."""

HOW: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window_left": 3},
    "causal window": {"causal": True, "window_left": 0},
    "cap": {"logits_soft_cap": 1.5, "causal": True},
    "rotated": {"rope": (2.0, 1e3)},
    "rotated causal": {"rope": (1.0, 1e4), "causal": True, "window_left": 5},
    "ALiBi": {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "causal": True},
    "ALiBi cap": {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "logits_soft_cap": 3.0},
}


def as_arguments(how: dict[str, Any]) -> dict[str, Any]:
    """The op's names for what `dense` takes."""
    arguments = {name: value for name, value in how.items() if name != "rope"}
    if "rope" in how:
        arguments["rope_scale"], arguments["rope_theta"] = how["rope"]
    return arguments


def attended(rows: StridedRows, keys: Any, values: Any, table: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*rows.query.shape[:2], values.shape[3])
    out, lse = torch.full(shape, torch.nan), torch.full(shape[:2], torch.nan)
    strided_attention(rows.query, keys, values, out, lse, *table, rows.scale, **how)
    return out, lse


def check(found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    for own, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages(page_size: int, how: dict[str, Any], seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, page_size=page_size, seed=seed)
    check(attended(rows, *rows.pools, rows.table, **as_arguments(how)), rows.expected(**how))


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_ragged_rows_with_values_of_another_size(how: dict[str, Any], seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, page_size=1, head_dim=24, value_dim=16, seed=seed)
    keys, values = (states.unsqueeze(2) for states in rows.ragged)
    table = rows.qo_indptr, rows.indptr, None, None
    check(attended(rows, keys, values, table, **as_arguments(how)), rows.expected(**how))


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize(("length", "queries"), [(1, 1), (17, 5), (3, 7), (130, 1)])
def test_one_row(length: int, queries: int, how: dict[str, Any], seed: int) -> None:
    rows = StridedRows([length], [queries], seed=seed)
    keys, values = (states.transpose(0, 1)[None] for states in rows.ragged)
    check(attended(rows, keys, values, (None,) * 4, **as_arguments(how)), rows.expected(**how))


@pytest.mark.parametrize("window_left", [-1, 2])
def test_masks(window_left: int, seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, seed=seed)
    masks = rows.masks()
    mask, mask_indptr = packed(masks)
    how = {"causal": True, "window_left": window_left}
    found = attended(rows, *rows.pools, rows.table, mask=mask, mask_indptr=mask_indptr, **how)
    check(found, rows.expected(masks, **how))
    assert (found[0][0] == 0).all()
    assert (found[1][0] == -torch.inf).all()


def test_factors(seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, seed=seed)
    logits, values = torch.rand(2, 4)
    found = attended(
        rows, *rows.pools, rows.table, value_scale=0.5, logit_factors=logits, value_factors=values, causal=True
    )
    rows.query = rows.query * logits[:, None]
    out, lse = rows.expected(causal=True)
    check(found, (out * values[:, None] * 0.5, lse))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_in_and_out(kv_dtype: torch.dtype, seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, dtype=torch.bfloat16, kv_dtype=kv_dtype, seed=seed)
    found = attended(rows, *rows.pools, rows.table)
    check(found, rows.expected())
    narrow = torch.empty(found[0].shape, dtype=kv_dtype)
    strided_attention(rows.query, *rows.pools, narrow, None, *rows.table, rows.scale)
    torch.testing.assert_close(narrow.float(), found[0].to(kv_dtype).float())


def test_equal_rows_need_no_qo_indptr(seed: int) -> None:
    rows = StridedRows([4, 9, 2], [2, 2, 2], seed=seed)
    check(attended(rows, *rows.pools, (None, *rows.table[1:]), causal=True), rows.expected(causal=True))


def test_wide_tables(seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, seed=seed)
    table = [column.long() for column in rows.table]
    check(attended(rows, *rows.pools, table), rows.expected())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"query": torch.zeros(12, 3, 16)}, "3 query heads of size 16 do not fit 2 kv heads of size 16"),
        ({"query": torch.zeros(12, 4, 8)}, "4 query heads of size 8 do not fit"),
        ({"query": torch.zeros(12, 4, 16).double()}, "query must be one of torch.float16"),
        ({"values": torch.zeros(1, 2, 4, 16)}, r"values \[P, K, S, E\]"),
        ({"out": torch.zeros(11, 4, 16)}, r"out must be \(12, 4, 16\); got \(11, 4, 16\)"),
        ({"lse": torch.zeros(12, 4).half()}, "lse must be float32; got torch.float16"),
        ({"qo_indptr": torch.zeros(3).int()}, r"qo_indptr must be \[7\] for 6 rows; got \(3,\)"),
        ({"indices": torch.zeros(3)}, "indices must be int32 or int64; got torch.float32"),
        ({"indptr": None}, r"qo_indptr must be \[2\] for 1 rows"),
        ({"indptr": None, "qo_indptr": None, "last_page_len": None}, "need indptr"),
        ({"qo_indptr": torch.tensor([0, 1, 2, 3, 4, 5, 13])}, "qo_indptr ends at 13, after the last of 12 tokens"),
        ({"mask": torch.zeros(3)}, r"mask must be \[bytes\] uint8; got \(3,\) torch.float32"),
        ({"mask": torch.zeros(3).byte()}, "a mask of 6 rows needs mask_indptr"),
        ({"slopes": torch.zeros(3)}, r"slopes must be \[4\] float32; got \(3,\)"),
        ({"rope_scale": 1.0}, "rope_theta > 0; got 16 and 0.0"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(changed: dict[str, Any], said: str) -> None:
    rows = StridedRows(LENGTHS, QUERIES)
    given: dict[str, Any] = dict(
        zip(("qo_indptr", "indptr", "indices", "last_page_len"), rows.table, strict=True),
        query=rows.query, keys=rows.pools[0], values=rows.pools[1], scale=1.0,
        out=torch.full((12, 4, 16), 7.0), lse=torch.full((12, 4), 7.0),
    )  # fmt: skip
    with pytest.raises(ValueError, match=said):
        strided_attention(**{**given, **changed})
    assert (given["out"] == 7).all()
    assert (given["lse"] == 7).all()


# ---- append


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_append_writes_what_lies_in_pages(dtype: torch.dtype, seed: int) -> None:
    rows = StridedRows(LENGTHS, QUERIES, head_dim=16, value_dim=8, dtype=dtype, seed=seed)
    keys, values = (torch.full_like(pool, torch.nan).transpose(1, 2).contiguous() for pool in rows.pools)
    token_rows = torch.tensor([row for row, length in enumerate(LENGTHS) for _ in range(length)] + [-1])
    positions = torch.tensor([position for length in LENGTHS for position in range(length)] + [0])
    padded = [torch.cat([states, states[:1]]) for states in rows.ragged]
    table = (token_rows.int(), positions.int(), rows.indptr, rows.indices)
    strided_append(*padded, keys.transpose(1, 2), values.transpose(1, 2), *table)
    for pool, written in zip(rows.pools, (keys, values), strict=True):
        torch.testing.assert_close(written.transpose(1, 2).float(), pool.float(), equal_nan=True, rtol=0, atol=0)


def test_append_clamps_to_fp8() -> None:
    keys, values = torch.zeros(2, 1, 1, 2, 16, dtype=torch.float8_e4m3fn)
    key, value = torch.full((1, 1, 16), 1e4), torch.full((1, 1, 16), -1e4)
    strided_append(key, value, keys, values, *torch.zeros(2, 1).int(), torch.tensor([0, 1]), torch.tensor([0]))
    assert (keys[0, 0, 0].float() == 448).all()
    assert (values[0, 0, 0].float() == -448).all()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"key": torch.zeros(2, 2, 8)}, r"key must be \[T, K, D\], and keys"),
        ({"values": torch.zeros(3, 2, 4, 16)}, "must have the same pages"),
        ({"token_rows": torch.zeros(3).int()}, r"token_rows must be \[2\], one entry a token; got \(3,\)"),
        ({"indices": torch.zeros(3)}, "int32 or int64"),
    ],
)
def test_appending_what_does_not_fit_is_refused(changed: dict[str, Any], said: str) -> None:
    keys, values = torch.zeros(2, 5, 2, 4, 16)
    given: dict[str, Any] = {
        "key": torch.ones(2, 2, 16), "value": torch.ones(2, 2, 16), "keys": keys, "values": values,
        "token_rows": torch.zeros(2).int(), "token_positions": torch.arange(2).int(),
        "indptr": torch.tensor([0, 1]), "indices": torch.tensor([3]),
    }  # fmt: skip
    with pytest.raises(ValueError, match=said):
        strided_append(**{**given, **changed})
    assert not keys.any()
