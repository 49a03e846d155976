"""Packed tokens on their way into pages, on any device, and what a dense computation in float32 makes of them.

Shapes: T packed tokens, H query heads, K kv heads, D head dimension, D' the same as stored, P pages, S page size,
B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.contracts import RopeAppendPagedKv

GIVEN = ["nothing", "norms", "query norm", "key norm", "positions", "all", "query norm and positions"]
"""What queries and keys are prepared with."""


class Sizes(NamedTuple):
    """Of heads and pages."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    stored: int = 16
    page_size: int = 4


def packed_tokens(
    spans: Sequence[tuple[int, int]],
    sizes: Sizes,
    given: str,
    dtype: torch.dtype,
    device: str = "cpu",
    rows_of_padding: int = 0,
) -> RopeAppendPagedKv:
    """Tokens from and to these places of each row, as parts of one fused product; free slots and pages hold NaN.

    The rows' pages are in random order. So many more rows are padding, whose
    token goes to place 0 of page 0, as in captured prefills.
    """
    spans = [*spans, *[(0, 1)] * rows_of_padding]
    places = [(row, at) for row, (start, end) in enumerate(spans) for at in range(start, end)]
    heads, kv_heads, head_dim, stored, page_size = sizes
    tokens = len(places)
    counts = [0 if row >= len(spans) - rows_of_padding else -(-end // page_size) for row, (_, end) in enumerate(spans)]
    own = [numbers.tolist() or [0] for numbers in (torch.randperm(sum(counts)) + 1).split(counts)]
    pages = torch.full((sum(counts) + 3, 2, kv_heads, page_size, stored), torch.nan, dtype=dtype)
    pages[..., head_dim:] = 0
    product = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    query, key, value = product.to(device).split([heads, kv_heads, kv_heads], 1)
    indptr = torch.tensor([0, *map(len, own)]).cumsum(0)
    columns = [[row for row, _ in places], [at for _, at in places], indptr.tolist(), list(chain(*own))]
    table = [torch.tensor(column, dtype=torch.int32, device=device) for column in columns]
    return RopeAppendPagedKv(query, key, value, pages.to(device), *table, **preparation_of(given, query))


def preparation_of(given: str, query: Tensor) -> dict[str, Any]:
    (tokens, _, size), how = query.shape, {"device": query.device, "dtype": query.dtype}
    found: dict[str, Any] = {}
    if given in ("norms", "query norm", "all", "query norm and positions"):
        found |= {"query_norm": (torch.rand(size) + 0.5).to(**how), "epsilon": 0.01}
    if given in ("norms", "key norm", "all"):
        found |= {"key_norm": (torch.rand(size) + 0.5).to(**how), "epsilon": 0.01}
    if given in ("positions", "all", "query norm and positions"):
        angles = torch.rand(tokens, size) * 6  # both halves have their own: an op may not assume that they are equal
        found |= {"cos": angles.cos().to(**how), "sin": angles.sin().to(**how)}
    return found


class Expected(NamedTuple):
    query: Tensor
    pages: Tensor


def expected(args: RopeAppendPagedKv) -> Expected:
    """Head by head and token by token, in float32: the queries, and the pages with the new keys and values."""
    query, pages = args.query.float(), args.pages.float().clone()
    query = torch.stack([_dense(args, query[token], args.query_norm, token) for token in range(len(query))] or [query])
    page_size, size = pages.shape[3], args.query.shape[2]
    for token, (row, at) in enumerate(zip(args.token_rows.tolist(), args.token_positions.tolist(), strict=True)):
        page = int(args.indices[int(args.indptr[row]) + at // page_size])
        pages[page, 0, :, at % page_size, :size] = _dense(args, args.key[token].float(), args.key_norm, token)
        pages[page, 1, :, at % page_size, :size] = args.value[token].float()
    return Expected(query.view(args.query.shape), pages)


def _dense(args: RopeAppendPagedKv, heads: Tensor, norm: Tensor | None, token: int) -> Tensor:
    if norm is not None:
        heads = torch.nn.functional.rms_norm(heads, heads.shape[-1:], norm.float(), args.epsilon)
    if args.cos is None or args.sin is None:
        return heads
    size = heads.shape[-1]
    turned = torch.zeros(size, size, device=heads.device)  # a matrix with two numbers in each column
    for column in range(size):
        mate = (column + size // 2) % size
        turned[column, column] = args.cos[token, column].float()
        turned[mate, column] = args.sin[token, column].float() * (-1 if column < size // 2 else 1)
    return heads @ turned


def check(args: RopeAppendPagedKv, out: Tensor, pages: Tensor, tolerance: float) -> None:
    """Compare queries and pages that an op has returned and written with the dense computation over ``args``."""
    dense = expected(args)
    assert (out.dtype, out.is_contiguous()) == (args.query.dtype, True)
    torch.testing.assert_close(out.float(), dense.query, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pages.float(), dense.pages, rtol=tolerance, atol=tolerance, equal_nan=True)
