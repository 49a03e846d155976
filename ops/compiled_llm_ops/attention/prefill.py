"""Attention over paged keys and values: ragged causal prefill and extend. Decode has ops of its own, in ``decode``.

Shapes: T packed tokens, B rows, H query heads, K kv heads, D head dimension, P pages, S page size, N entries of the
page table, L tokens of one row in the cache, Q queries of one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from compiled_llm_ops.attention.lse import define_with_lse
from compiled_llm_ops.contracts import Geometry, PagedAttention, PageTable, check_int32, find_plan
from compiled_llm_ops.library import same_arguments_as


def paged_attention(
    query: Tensor,
    pages: Tensor,
    qo_indptr: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    scale: float,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of packed queries over the pages of their rows.

    Row b's queries are ``query[qo_indptr[b]:qo_indptr[b + 1]]``; they are the last tokens of the row, whose keys and
    values already lie in the pages.

    Args:
        query: ``[T, H, D]``, any strides; H a multiple of K.
        pages: ``[P, 2, K, S, D']`` with D' >= D; columns past D are zero.
        qo_indptr: ``[B + 1]`` int32, where each row's queries begin.
        indptr: ``[B + 1]`` int32, where each row's pages begin in ``indices``.
        indices: ``[N]`` int32, page numbers.
        last_page_len: ``[B]`` int32, tokens in each row's last page, 1 to S.
        scale: factor on the logits before the softmax.
        window_left: tokens visible to the left of each query; -1 for all.
        logits_soft_cap: ``cap * tanh(logits / cap)`` after scaling; 0.0 for none.

    Returns:
        ``[T, H, D]``, contiguous, of the query's dtype.

    Raises:
        ValueError: shapes do not fit together.
        RuntimeError: on CUDA, nothing was planned for this page table.

    Source:
        On CUDA FlashInfer ``BatchPrefillWithPagedKVCacheWrapper`` (https://arxiv.org/abs/2501.01005).
    """
    table = (qo_indptr, indptr, indices, last_page_len)
    out: Tensor = _paged_attention(query, pages, *table, scale, window_left, logits_soft_cap)
    return out


@same_arguments_as(paged_attention)
def paged_attention_lse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """``paged_attention`` that also returns the log-sum-exp of each query's logits.

    Args: those of ``paged_attention``.

    Returns:
        ``[T, H, D]`` of the query's dtype, and ``[T, H]`` float32: the log-sum-exp in base 2 (multiply by ln 2 for
        the natural one). Both contiguous.

    Raises:
        ValueError: shapes do not fit together.
        RuntimeError: on CUDA, nothing was planned for this page table.

    Source:
        On CUDA FlashInfer ``BatchPrefillWithPagedKVCacheWrapper`` with ``return_lse``
        (https://arxiv.org/abs/2501.01005).
    """
    out, lse = _paged_attention_lse(*args, **kwargs)
    return out, lse


def _check(args: PagedAttention) -> None:
    query, pages, table = args.query, args.pages, args.table
    if query.dim() != 3 or pages.dim() != 5 or pages.shape[1] != 2:
        raise ValueError(
            "paged_attention: query must be [T, H, D] and pages [P, 2, K, S, D]; got "
            f"{tuple(query.shape)} and {tuple(pages.shape)}"
        )
    if query.shape[1] % pages.shape[2] or query.shape[2] > pages.shape[4]:
        raise ValueError(
            f"paged_attention: {query.shape[1]} query heads of size {query.shape[2]} do not fit pages with "
            f"{pages.shape[2]} kv heads of size {pages.shape[4]}"
        )
    rows = table.last_page_len.shape[0]
    if table.qo_indptr.shape[0] != rows + 1 or table.indptr.shape[0] != rows + 1:
        raise ValueError(
            f"paged_attention: qo_indptr and indptr must be [{rows + 1}] for {rows} rows; got "
            f"[{table.qo_indptr.shape[0]}] and [{table.indptr.shape[0]}]"
        )
    check_int32("paged_attention", **table._asdict())


# ---- CPU: in plain PyTorch, one row after the other


def gather(pages: Tensor, numbers: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and the values ``[..., K, n * S, D]`` in the pages ``numbers`` ``[..., n]``."""
    _, _, kv_heads, page_size, padded = pages.shape
    # Whole [S, D'] pieces, in the order they are wanted in: one copy instead of two.
    heads = torch.arange(2 * kv_heads, dtype=numbers.dtype).view(2, *[1] * (numbers.dim() - 1), kv_heads, 1)
    pieces = (numbers * (2 * kv_heads)).unsqueeze(-2) + heads
    gathered = pages.view(-1, page_size * padded).index_select(0, pieces.view(-1))
    gathered = gathered.view(*pieces.shape[:-1], -1, padded)
    if head_dim != padded or dtype != pages.dtype:
        gathered = gathered[..., :head_dim].to(dtype)
    keys, values = gathered.unbind()
    return keys, values


def _rows(query: Tensor, pages: Tensor, table: PageTable) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each row's queries as a slice, and its keys and values ``[K, L, D]`` gathered from its pages."""
    page_size, head_dim = pages.shape[3], query.shape[2]
    starts, ends = table.qo_indptr.tolist(), table.indptr.tolist()
    for row, last in enumerate(table.last_page_len.tolist()):
        if starts[row] == starts[row + 1]:
            continue
        keys, values = gather(pages, table.indices[ends[row] : ends[row + 1]], head_dim, query.dtype)
        length = (ends[row + 1] - ends[row] - 1) * page_size + last
        yield slice(starts[row], starts[row + 1]), keys[:, :length], values[:, :length]


def _visible(queries: int, length: int, window_left: int) -> Tensor | None:
    """``[Q, L]`` bool: which keys each query sees; None where it is all of them. The last query sees the last key."""
    if queries == 1 and not 0 <= window_left < length - 1:
        return None
    distance = torch.arange(length - queries, length)[:, None] - torch.arange(length)[None, :]
    return (distance >= 0) if window_left < 0 else (distance >= 0) & (distance <= window_left)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, window_left: int) -> Tensor:
    """``[Q, H, D]`` from ``query`` ``[Q, H, D]`` and ``keys``, ``values`` ``[K, L, D]``."""
    queries, heads, head_dim = query.shape
    kv_heads, length, _ = keys.shape
    whole = queries == length and window_left < 0
    # A group of heads is a batch of its own, over keys and values that are not repeated in memory.
    shape = (kv_heads, heads // kv_heads, length, head_dim)
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1).unflatten(0, shape[:2]),
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        attn_mask=None if whole else _visible(queries, length, window_left),
        is_causal=whole,
        scale=scale,
    )
    return out.flatten(0, 1).transpose(0, 1)


def _attend_lse(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None, logits_soft_cap: float
) -> tuple[Tensor, Tensor]:
    """``[Q, H, D]`` and ``[Q, H]``, the log-sum-exp in base 2; arithmetic in float32."""
    queries, heads, head_dim = query.shape
    kv_heads = key.shape[0]
    grouped = query.float().view(queries, kv_heads, heads // kv_heads, head_dim)
    logits = torch.einsum("qkgd,kld->qkgl", grouped, key.float()) * scale
    if logits_soft_cap > 0:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None, None, :], -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse[..., None])
    out = torch.einsum("qkgl,kld->qkgd", weights, value.float())
    return out.reshape(queries, heads, head_dim), lse.reshape(queries, heads) / math.log(2)


def attend_row_by_row(
    query: Tensor,
    pages: Tensor,
    table: PageTable,
    scale: float,
    window_left: int,
    logits_soft_cap: float,
    wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return ``[T, H, D]`` and, if it is wanted, the log-sum-exp ``[T, H]`` in base 2."""
    out = torch.empty(query.shape, dtype=query.dtype)
    lse = torch.empty(query.shape[:2], dtype=torch.float32)
    for tokens, keys, values in _rows(query, pages, table):
        if wants_lse or logits_soft_cap > 0:
            visible = _visible(tokens.stop - tokens.start, keys.shape[1], window_left)
            out[tokens], lse[tokens] = _attend_lse(query[tokens], keys, values, scale, visible, logits_soft_cap)
        else:
            out[tokens] = _attend(query[tokens], keys, values, scale, window_left)
    return out, lse if wants_lse else None


def _cpu(args: PagedAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    how = (args.scale, args.window_left, args.logits_soft_cap)
    return attend_row_by_row(args.query, args.pages, args.table, *how, wants_lse)


# ---- CUDA: FlashInfer's kernels with the plan that was made for this page table


def _cuda(args: PagedAttention, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    _check(args)
    query, (tokens, heads, head_dim) = args.query, args.query.shape
    _, _, kv_heads, page_size, padded = args.pages.shape
    geometry = Geometry(
        heads, kv_heads, padded, page_size, args.window_left, args.logits_soft_cap, query.dtype, args.pages.dtype
    )
    plan = find_plan(args.indptr, args.last_page_len.shape[0], geometry)
    query = torch.nn.functional.pad(query, (0, padded - head_dim)) if padded != head_dim else query.contiguous()
    out = torch.empty((tokens, heads, padded), dtype=query.dtype, device=query.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=query.device) if wants_lse else None
    # The op's own columns, not those that were planned: functionalisation may have put new lengths into a new tensor.
    plan.run(query, args.pages, out, lse, args.scale, args.table)
    return out if padded == head_dim else out[..., :head_dim].contiguous(), lse


_paged_attention, _paged_attention_lse = define_with_lse("paged_attention", PagedAttention, cpu=_cpu, cuda=_cuda)
