"""Decode: one new token a row, whose keys and values are written into the pages, and whose query attends over them.

Two ops rather than an optional output: ``decode_attention``, and ``decode_attention_lse`` which also returns the
log-sum-exp.

Shapes: B rows, H query heads, K kv heads, D head dimension, P pages, S page size, N entries of the page table,
L tokens of one row in the cache, the new one included.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compiled_llm_ops import attention_tiling
from compiled_llm_ops.attention import gather, paged_attention, paged_attention_lse
from compiled_llm_ops.library import check_int32, define

_SIGNATURE = (
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) pages, Tensor indptr, Tensor indices, Tensor last_page_len, "
    "float scale, int window_left=-1, float logits_soft_cap=0.0)"
)


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    """Write each row's newest key and value into its pages, then attend with its query over all of them.

    The newest token of row b goes to page ``indices[indptr[b + 1] - 1]``, slot ``last_page_len[b] - 1``: the table says
    how the rows are with it. Nothing has to be planned, and a recorded launch may be replayed with any lengths.

    Args:
        query: ``[B, H, D]``, any strides; H a multiple of K.
        key: ``[B, K, D]``, any strides.
        value: ``[B, K, D]``, like ``key``.
        pages: ``[P, 2, K, S, D']`` with D' >= D, written in place; columns past D are zero, and left alone.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, 1 to S.
        scale: factor on the logits before the softmax.
        window_left: tokens visible to the left of each query; -1 for all.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.

    Returns:
        ``[B, H, D]``, contiguous, of the query's dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        On CUDA a Triton kernel of our own after Flash-Decoding (https://pytorch.org/blog/flash-decoding/).
    """
    given = (query, key, value, pages, indptr, indices, last_page_len)
    out: Tensor = _decode_attention(*given, scale, window_left, logits_soft_cap)
    return out


def decode_attention_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``decode_attention`` that also returns the log-sum-exp of each query's logits.

    Args:
        query: ``[B, H, D]``, any strides; H a multiple of K.
        key: ``[B, K, D]``, any strides.
        value: ``[B, K, D]``, like ``key``.
        pages: ``[P, 2, K, S, D']`` with D' >= D, written in place; columns past D are zero, and left alone.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, 1 to S.
        scale: factor on the logits before the softmax.
        window_left: tokens visible to the left of each query; -1 for all.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.

    Returns:
        ``[B, H, D]`` of the query's dtype, and ``[B, H]`` float32: the log-sum-exp in base 2 (multiply by ln 2 for
        the natural one). Both contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        On CUDA the Triton kernel of ``decode_attention``, after Flash-Decoding
        (https://pytorch.org/blog/flash-decoding/).
    """
    given = (query, key, value, pages, indptr, indices, last_page_len)
    out, lse = _decode_attention_lse(*given, scale, window_left, logits_soft_cap)
    return out, lse


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
) -> None:
    if query.dim() != 3 or pages.dim() != 5 or pages.shape[1] != 2:
        raise ValueError(
            "decode_attention: query must be [B, H, D] and pages [P, 2, K, S, D]; got "
            f"{tuple(query.shape)} and {tuple(pages.shape)}"
        )
    (rows, heads, head_dim), (kv_heads, _, stored) = query.shape, pages.shape[2:]
    if heads % kv_heads or head_dim > stored:
        raise ValueError(
            f"decode_attention: {heads} query heads of size {head_dim} do not fit pages with {kv_heads} kv heads of "
            f"size {stored}"
        )
    expected = (rows, kv_heads, head_dim)
    if key.shape != expected or value.shape != expected or key.dtype != value.dtype:
        raise ValueError(
            f"decode_attention: key and value must be {expected} of one dtype for {rows} rows; got "
            f"{tuple(key.shape)} {key.dtype} and {tuple(value.shape)} {value.dtype}"
        )
    if indptr.shape != (rows + 1,) or last_page_len.shape != (rows,):
        raise ValueError(
            f"decode_attention: indptr must be [{rows + 1}] and last_page_len [{rows}] for {rows} rows; got "
            f"{tuple(indptr.shape)} and {tuple(last_page_len.shape)}"
        )
    check_int32("decode_attention", indptr=indptr, indices=indices, last_page_len=last_page_len)


# ---- CPU: in plain PyTorch


def _append(key: Tensor, value: Tensor, pages: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> None:
    page = indices[indptr[1:] - 1]
    pages[page, :, :, last_page_len - 1, : key.shape[2]] = torch.stack([key, value], dim=1).to(pages.dtype)


def _one_each(rows: int) -> Tensor:
    """Return the ``qo_indptr`` of one query a row."""
    return torch.arange(rows + 1, dtype=torch.int32)


def _cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    _check(query, key, value, pages, indptr, indices, last_page_len)
    _append(key, value, pages, indptr, indices, last_page_len)
    starts = indptr.tolist()
    counts = [end - start for start, end in pairwise(starts)]
    if logits_soft_cap > 0 or len(counts) * max(counts) > 2 * sum(counts):
        table = (_one_each(len(query)), indptr, indices, last_page_len)
        return paged_attention(query, pages, *table, scale, window_left, logits_soft_cap)
    return _attend(query, pages, starts, indices, last_page_len.tolist(), scale, window_left)


def _cpu_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    _check(query, key, value, pages, indptr, indices, last_page_len)
    _append(key, value, pages, indptr, indices, last_page_len)
    table = (_one_each(len(query)), indptr, indices, last_page_len)
    return paged_attention_lse(query, pages, *table, scale, window_left, logits_soft_cap)


def _attend(
    query: Tensor,
    pages: Tensor,
    indptr: list[int],
    indices: Tensor,
    last_page_len: list[int],
    scale: float,
    window_left: int,
) -> Tensor:
    """Attend with one query a row, all rows padded to the longest."""
    rows, heads, head_dim = query.shape
    kv_heads, page_size = pages.shape[2:4]
    own = [indices[start:end] for start, end in pairwise(indptr)]
    lengths = [(len(row) - 1) * page_size + last for row, last in zip(own, last_page_len, strict=True)]
    longest = max(lengths)
    keys, values = gather(pages, pad_sequence(own, batch_first=True), head_dim, query.dtype)
    first = 0
    visible = None
    if rows > 1 and (window_left >= 0 or min(lengths) < longest):
        position, length = torch.arange(longest), torch.tensor(lengths)[:, None]
        visible = position < length
        if window_left >= 0:
            visible &= position >= length - 1 - window_left
        visible = visible[:, None, None, :]
    elif window_left >= 0:
        first = max(0, longest - 1 - window_left)
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        query.view(rows, kv_heads, heads // kv_heads, head_dim),  # a group of heads as if it were so many queries
        keys[..., first:longest, :],
        values[..., first:longest, :],
        attn_mask=visible,
        scale=scale,
    )
    return out.reshape(query.shape)


# ---- CUDA


class _Device(NamedTuple):
    processors: int
    shared_memory: int
    pdl: bool  # kernels may begin before those in front have ended


@functools.cache
def _device(device: torch.device) -> _Device:
    properties = torch.cuda.get_device_properties(device)
    return _Device(
        properties.multi_processor_count,
        properties.shared_memory_per_multiprocessor,
        torch.cuda.get_device_capability(device) >= (9, 0),
    )


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int,
    logits_soft_cap: float,
    lse: Tensor | None,
) -> Tensor:
    from compiled_llm_ops import triton_attention

    _, _, kv_heads, page_size, padded = pages.shape
    rows, heads, _ = query.shape
    device = _device(query.device)
    # Nothing that changes from step to step: a recorded launch is replayed with rows of other lengths.
    most_keys = indices.shape[0] * page_size
    most_keys = most_keys if window_left < 0 else min(most_keys, window_left + 1)
    tiling = attention_tiling.choose(
        rows, kv_heads, heads // kv_heads, padded, most_keys, device.processors, device.shared_memory
    )
    given = (query, key, value, pages, indptr, indices, last_page_len)
    with torch.cuda.device(query.device):  # Triton launches on the current one
        return triton_attention.decode(*given, scale, window_left, logits_soft_cap, lse, tiling=tiling, pdl=device.pdl)


def _cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    given = (query, key, value, pages, indptr, indices, last_page_len)
    _check(*given)
    return _launch(*given, scale, window_left, logits_soft_cap, None)


def _cuda_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    given = (query, key, value, pages, indptr, indices, last_page_len)
    _check(*given)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    return _launch(*given, scale, window_left, logits_soft_cap, lse), lse


# ---- fakes


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    return query.new_empty(query.shape)


def _fake_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


_decode_attention = define(f"decode_attention{_SIGNATURE} -> Tensor", fake=_fake, cpu=_cpu, cuda=_cuda)
_decode_attention_lse = define(
    f"decode_attention_lse{_SIGNATURE} -> (Tensor, Tensor)", fake=_fake_lse, cpu=_cpu_lse, cuda=_cuda_lse
)
