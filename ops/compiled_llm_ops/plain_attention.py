"""Attention over pages in plain PyTorch, one row after the other: the CPU kernels, and the reference for all others.

Shapes: T packed tokens, B rows, H query heads, K kv heads, D head dimension, P pages, S page size, L tokens of one row
in the cache, Q queries of one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from compiled_llm_ops.contracts import AppendPagedKv, PageTable, has_uneven_heads, value_size


def gather(pages: Tensor, numbers: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and the values ``[..., K, n * S, D]`` in the pages ``numbers`` ``[..., n]``."""
    if has_uneven_heads(pages):
        both = pages[numbers].transpose(-4, -3).flatten(-3, -2).to(dtype)
        return both[..., :head_dim], both[..., head_dim:]
    _, _, kv_heads, page_size, padded = pages.shape
    # Whole [S, D'] pieces, in the order they are wanted in: one copy instead of two.
    heads = torch.arange(2 * kv_heads, dtype=numbers.dtype, device=numbers.device).view(
        2, *[1] * (numbers.dim() - 1), kv_heads, 1
    )
    pieces = (numbers * (2 * kv_heads)).unsqueeze(-2) + heads
    gathered = pages.view(-1, page_size * padded).index_select(0, pieces.view(-1))
    gathered = gathered.view(*pieces.shape[:-1], -1, padded)
    if head_dim != padded or dtype != pages.dtype:
        gathered = gathered[..., :head_dim].to(dtype)
    keys, values = gathered.unbind()
    return keys, values


def _rows(query: Tensor, pages: Tensor, table: PageTable) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each row's queries as a slice, and its keys and values ``[K, L, D]`` gathered from its pages."""
    page_size, head_dim = pages.shape[-2], query.shape[2]
    starts, ends = table.qo_indptr.tolist(), table.indptr.tolist()
    for row, last in enumerate(table.last_page_len.tolist()):
        if starts[row] == starts[row + 1]:
            continue
        keys, values = gather(pages, table.indices[ends[row] : ends[row + 1]], head_dim, query.dtype)
        length = (ends[row + 1] - ends[row] - 1) * page_size + last
        yield slice(starts[row], starts[row + 1]), keys[:, :length], values[:, :length]


def _visible(queries: int, length: int, window_left: int, device: torch.device) -> Tensor | None:
    """``[Q, L]`` bool: which keys each query sees; None if it sees all. The last query sees the last key."""
    if queries == 1 and not 0 <= window_left < length - 1:
        return None
    positions = torch.arange(length, device=device)
    distance = positions[length - queries :, None] - positions[None, :]
    return (distance >= 0) if window_left < 0 else (distance >= 0) & (distance <= window_left)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, window_left: int) -> Tensor:
    """``[Q, H, D]``, D that of the values, from ``query`` ``[Q, H, D]`` and ``keys``, ``values`` ``[K, L, D]``."""
    queries, heads, _ = query.shape
    kv_heads, length, _ = keys.shape
    whole = queries == length and window_left < 0
    # A group of heads is a batch of its own, over keys and values that are not repeated in memory.
    group = heads // kv_heads
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1).unflatten(0, (kv_heads, group)),
        keys[:, None].expand(-1, group, -1, -1),
        values[:, None].expand(-1, group, -1, -1),
        attn_mask=None if whole else _visible(queries, length, window_left, query.device),
        is_causal=whole,
        scale=scale,
    )
    return out.flatten(0, 1).transpose(0, 1)


def attend_lse(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None, logits_soft_cap: float
) -> tuple[Tensor, Tensor]:
    """``[Q, H, D]`` and ``[Q, H]``, the log-sum-exp in base 2; arithmetic in float32.

    ``key`` and ``value`` are ``[K, L, D]``, ``visible`` ``[Q, L]``. A query that sees no key has zeros, and minus
    infinity.
    """
    queries, heads, head_dim = query.shape
    kv_heads = key.shape[0]
    grouped = query.float().view(queries, kv_heads, heads // kv_heads, head_dim)
    logits = torch.einsum("qkgd,kld->qkgl", grouped, key.float()) * scale
    if logits_soft_cap > 0:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None, None, :], -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = torch.einsum("qkgl,kld->qkgd", weights, value.float())
    return out.reshape(queries, heads, -1), lse.reshape(queries, heads) / math.log(2)


def attend_row_by_row(
    query: Tensor,
    pages: Tensor,
    table: PageTable,
    scale: float,
    window_left: int,
    logits_soft_cap: float,
    wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return ``[T, H, D]`` and, if ``wants_lse``, the log-sum-exp ``[T, H]`` in base 2."""
    sizes = (*query.shape[:2], value_size(query, pages))
    out = torch.empty(sizes, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    for tokens, keys, values in _rows(query, pages, table):
        if wants_lse or logits_soft_cap > 0:
            visible = _visible(tokens.stop - tokens.start, keys.shape[1], window_left, query.device)
            out[tokens], lse[tokens] = attend_lse(query[tokens], keys, values, scale, visible, logits_soft_cap)
        else:
            out[tokens] = _attend(query[tokens], keys, values, scale, window_left)
    return out, lse if wants_lse else None


def append(args: AppendPagedKv) -> None:
    """Write the keys and values of new tokens; see ``append_paged_kv``."""
    page_size = args.pages.shape[-2]
    page = args.indices[args.indptr[args.token_rows] + args.token_positions // page_size]
    store(args.pages, page, args.token_positions % page_size, args.key, args.value)


def store(pages: Tensor, numbers: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write keys and values ``[T, K, D]`` at ``slots`` ``[T]`` of the pages ``numbers`` ``[T]``."""
    if has_uneven_heads(pages):
        pages[numbers, :, slots] = torch.cat([key, value], dim=2).to(pages.dtype)
    else:
        pages[numbers, :, :, slots, : key.shape[2]] = torch.stack([key, value], dim=1).to(pages.dtype)
