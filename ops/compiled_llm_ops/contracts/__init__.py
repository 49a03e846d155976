"""Signatures of the ops, and constants that they share with their kernels; ops' docstrings explain arguments."""

# Fields, their order and defaults are the op's schema (see ``library.define_op``).
# Shapes: B rows, T packed tokens, H query heads, K kv heads, D head dimension, P pages, S page size.

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Geometry(NamedTuple):
    """One attention group: layers that share a geometry share a plan.

    Attributes:
        query_heads: H.
        kv_heads: K.
        head_dim: D as stored in the pages, after padding.
        page_size: S, in tokens.
        window_left: tokens visible to the left of the query; -1 for all.
        logits_soft_cap: ``cap * tanh(logits / cap)``; 0.0 for none.
        dtype: type of the queries.
        kv_dtype: type of the pages.
        rope_size: E of latents of size D, in pages ``[P, S, D + E]`` that all heads share; 0 for keys and values.
        function: key of what becomes of logits, another key for another meaning; empty for softmax attention.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window_left: int
    logits_soft_cap: float
    dtype: torch.dtype
    kv_dtype: torch.dtype
    rope_size: int = 0
    function: str = ""


class PageTable(NamedTuple):
    """Where the rows' tokens lie. The same columns exist on the host (for ``plan``) and on the device.

    Attributes:
        qo_indptr: ``[B + 1]`` int32, row b's queries are tokens ``qo_indptr[b]:qo_indptr[b + 1]``.
        indptr: ``[B + 1]`` int32, row b's pages are ``indices[indptr[b]:indptr[b + 1]]``.
        indices: ``[N]`` int32, page numbers of all rows, one row after the other; N may be larger than needed.
        last_page_len: ``[B]`` int32, tokens in each row's last page, the new ones included, 1 to S.
    """

    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def common_fields(args: Any, signature: type[Any]) -> dict[str, Any]:
    """Return the arguments of an op that another one has, too, by name: ops of a family name and order them alike."""
    return {name: getattr(args, name) for name in signature._fields if name in args._fields}


def table_of(args: Any) -> PageTable:
    """Return the page table among an op's arguments."""
    return PageTable(args.qo_indptr, args.indptr, args.indices, args.last_page_len)


def geometry_of(
    op: str, query: Tensor, pages: Tensor, window_left: int, logits_soft_cap: float = 0.0, function: str = ""
) -> Geometry:
    """Return the geometry of queries ``[T, H, D]``, as large as stored, over pages; ValueError for uneven heads."""
    check_even_heads(op, pages)
    _, _, kv_heads, page_size, stored = pages.shape
    return Geometry(
        query.shape[1],
        kv_heads,
        stored,
        page_size,
        window_left,
        logits_soft_cap,
        query.dtype,
        pages.dtype,
        function=function,
    )


def check_token_places(op: str, tokens: int, args: Any) -> None:
    """Raise ValueError if what says where so many tokens lie in the pages does not fit, or is not int32."""
    if args.token_rows.shape != (tokens,) or args.token_positions.shape != (tokens,):
        raise ValueError(
            f"{op}: token_rows and token_positions must be [{tokens}], one entry a token; got "
            f"{tuple(args.token_rows.shape)} and {tuple(args.token_positions.shape)}"
        )
    columns = {name: getattr(args, name) for name in ("token_rows", "token_positions", "indptr", "indices")}
    check_int32(op, **columns)
    # Kernels read their entries next to each other. One token's row, expanded to several, has no step between them.
    for name, column in columns.items():
        if not column.is_contiguous():
            strides = column.stride()
            raise ValueError(f"{op}: {name} must be contiguous; got strides {strides}: call .contiguous() on it")


def check_rows(op: str, table: PageTable) -> None:
    """Raise ValueError if the columns of a page table do not fit together, or are not int32."""
    rows = table.last_page_len.shape[0]
    if table.qo_indptr.shape != (rows + 1,) or table.indptr.shape != (rows + 1,):
        raise ValueError(
            f"{op}: qo_indptr and indptr must be [{rows + 1}] for {rows} rows; got {list(table.qo_indptr.shape)} and "
            f"{list(table.indptr.shape)}"
        )
    check_int32(op, **table._asdict())


def check_int32(op: str, **columns: Tensor) -> None:
    """Check the columns of a page table, which kernels read by their address; ValueError if one is not int32."""
    for name, column in columns.items():
        if column.dtype != torch.int32:
            raise ValueError(f"{op}: {name} must be int32; got {column.dtype}")


def has_uneven_heads(pages: Tensor) -> bool:
    """Whether pages are ``[P, K, S, D + E]``: each key is followed by a value of another size E."""
    return pages.dim() == 4


def value_size(query: Tensor, pages: Tensor) -> int:
    """Return the head size of values, for queries ``[T, H, D]``."""
    return pages.shape[3] - query.shape[2] if has_uneven_heads(pages) else query.shape[2]


def check_pages(op: str, query: Tensor, pages: Tensor) -> None:
    """Check that queries ``[T, H, D]`` can attend over pages; ValueError if not."""
    even = pages.dim() == 5 and pages.shape[1] == 2
    if query.dim() != 3 or not (even or (has_uneven_heads(pages) and value_size(query, pages) != query.shape[2])):
        raise ValueError(
            f"{op}: query must be [T, H, D] and pages [P, 2, K, S, D]; got {tuple(query.shape)} and "
            f"{tuple(pages.shape)}"
        )
    (_, heads, head_dim), (kv_heads, _, stored) = query.shape, pages.shape[-3:]
    if heads % kv_heads or head_dim > stored or value_size(query, pages) < 1:
        raise ValueError(
            f"{op}: {heads} query heads of size {head_dim} do not fit pages with {kv_heads} kv heads of size {stored}"
        )


def check_even_heads(op: str, pages: Tensor) -> None:
    """Raise ValueError if pages are not ``[P, 2, K, S, D]``, which most kernels read alone."""
    if has_uneven_heads(pages):
        raise ValueError(
            f"{op}: pages {tuple(pages.shape)}, whose values have another size than the keys, are written and read by "
            "backend='reference' only"
        )


FP8 = torch.float8_e4m3fn
"""The only dtype of fp8 that pages may have: ``clamp(x / scale, -448, 448)`` in e4m3, with scales by kv head."""
# Before torch 2.12 casting a number beyond 448 gives NaN, so writers clamp first.

FP8_LARGEST = 448.0  # the largest number in e4m3, which has no infinities

SCALED_DTYPES = {FP8: FP8_LARGEST}  # those of pages with scales, and the largest number of each
SCALED_IN_KERNELS = frozenset({FP8})  # those that kernels on CUDA convert

FP8_CAPABILITY = (8, 9)  # the compute capability from which on Triton converts from and to e4m3


def check_scales(
    op: str, pages: Tensor, key_scale: Tensor | None, value_scale: Tensor | None, saturated: Tensor | None = None
) -> None:
    """Raise ValueError if pages of fp8 have another shape, or scales or the count of clamped numbers do not fit."""
    kv_heads = pages.shape[-3]
    optional = {"key_scale": key_scale, "value_scale": value_scale, "saturated": saturated}
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    if pages.dtype not in SCALED_DTYPES:
        if given:
            scaled = " or ".join(map(str, SCALED_DTYPES))
            raise ValueError(
                f"{op}: {', '.join(given)} must be None for pages of {pages.dtype}, which are not {scaled}"
            )
        return
    if has_uneven_heads(pages):
        raise ValueError(f"{op}: pages of {pages.dtype} must be [P, 2, K, S, D]; got {tuple(pages.shape)}")
    for name, tensor in given.items():
        shape, dtype = ((1,), torch.int64) if name == "saturated" else ((kv_heads,), torch.float32)
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != pages.device:
            raise ValueError(
                f"{op}: {name} must be {shape} {dtype} on {pages.device} for {kv_heads} kv heads; got "
                f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )


def check_capability(op: str, pages: Tensor) -> None:
    """Raise ValueError if pages are of fp8, and their device has no instructions for it."""
    if pages.dtype == FP8 and pages.is_cuda and torch.cuda.get_device_capability(pages.device) < FP8_CAPABILITY:
        raise ValueError(f"{op}: pages of {FP8} need compute capability {'.'.join(map(str, FP8_CAPABILITY))} or newer")


class AppendPagedKv(NamedTuple):
    key: Tensor
    value: Tensor
    pages: Tensor
    token_rows: Tensor
    token_positions: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    backend: str = "flashinfer"
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    saturated: Tensor | None = None


class RopeAppendPagedKv(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    pages: Tensor
    token_rows: Tensor
    token_positions: Tensor
    indptr: Tensor
    indices: Tensor
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    epsilon: float = 0.0
    cos: Tensor | None = None
    sin: Tensor | None = None
    overlap: bool = False
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    saturated: Tensor | None = None


class PlanPagedAttention(NamedTuple):
    """Arguments of ``plan_paged_attention``; from ``query_heads`` on the fields of ``Geometry``, then the rest."""

    plan: Tensor
    numbers: Tensor
    qo_indptr: Tensor
    indptr: Tensor
    last_page_len: Tensor
    workspace: Tensor
    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window_left: int
    logits_soft_cap: float
    dtype: torch.dtype
    kv_dtype: torch.dtype
    rope_size: int = 0
    function: str = ""
    captured_tokens: int = -1
    variant: int = -1

    @property
    def geometry(self) -> Geometry:
        return Geometry(**common_fields(self, Geometry))


class PlannedBatch(NamedTuple):
    """A planned batch, with its page table on the host."""

    qo_indptr: NDArray[np.int32]  # ``[B + 1]`` int32
    indptr: NDArray[np.int32]  # ``[B + 1]`` int32
    last_page_len: NDArray[np.int32]  # ``[B]`` int32
    geometry: Geometry
    workspace: Tensor  # of the launches
    captured_tokens: int = -1  # as of ``plan_paged_attention``, like ``schedule``, its ``variant``
    schedule: int = -1


class PagedAttention(NamedTuple):
    query: Tensor
    pages: Tensor
    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    plan: Tensor
    workspace: Tensor
    scale: float
    window_left: int = -1
    logits_soft_cap: float = 0.0
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def geometry(self) -> Geometry:
        return geometry_of("paged_attention", self.query, self.pages, self.window_left, self.logits_soft_cap)


class DecodeAttention(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    pages: Tensor
    starts: Tensor
    lengths: Tensor
    indices: Tensor
    scale: float
    window_left: int = -1
    logits_soft_cap: float = 0.0
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    epsilon: float = 0.0
    cos: Tensor | None = None
    sin: Tensor | None = None
    overlap: bool = False
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    saturated: Tensor | None = None
    visible: Tensor | None = None

    @property
    def new_tokens(self) -> int:
        return self.query.shape[0] // self.starts.shape[0]


def newest_pages(new_tokens: int, page_size: int) -> int:
    """Return in how many pages a row's newest tokens may lie."""
    return (new_tokens + page_size - 2) // page_size + 1


CASCADE_QUERIES = 64
"""Queries that read the keys of a work item of ``cascade_attention`` together, at most: a tile of a tensor core."""
