"""Attention over pages in plain PyTorch, one row after the other: the CPU kernels, and the reference for all others."""

# Shapes: T packed tokens, B rows, H query heads, K kv heads, D head dimension, P pages, S page size, L tokens of one
# row in the cache, Q queries of one row.

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_llm_ops.contracts import (
    SCALED_DTYPES,
    AppendPagedKv,
    DecodeAttention,
    PageTable,
    RopeAppendPagedKv,
    has_uneven_heads,
    value_size,
)

Writes = AppendPagedKv | RopeAppendPagedKv | DecodeAttention  # arguments of ops that write keys and values into pages


def gather(pages: Tensor, numbers: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values ``[..., K, n * S, D]`` in pages ``numbers`` ``[..., n]``; those with scales are not scaled."""
    if has_uneven_heads(pages):
        both = pages[numbers].transpose(-4, -3).flatten(-3, -2).to(dtype)
        return both[..., :head_dim], both[..., head_dim:]
    _, _, kv_heads, page_size, padded = pages.shape
    # Whole [S, D'] pieces, in the order they are wanted in: one copy instead of two.
    (pages_of,) = as_arrays(numbers)
    heads: Any = torch.arange(2 * kv_heads, device=numbers.device) if numbers.is_cuda else np.arange(2 * kv_heads)
    pieces = pages_of[..., None, :] * (2 * kv_heads) + heads.reshape(2, *[1] * (numbers.dim() - 1), kv_heads, 1)
    chosen = torch.as_tensor(pieces.reshape(-1), device=numbers.device)
    gathered = as_bytes(pages).view(-1, page_size * padded).index_select(0, chosen)
    if gathered.dtype != pages.dtype:
        gathered = gathered.view(pages.dtype)
    gathered = gathered.view(*pieces.shape[:-1], -1, padded)
    if head_dim != padded or dtype != pages.dtype:
        gathered = gathered[..., :head_dim].to(dtype)
    return gathered[0], gathered[1]


def _rows(query: Tensor, pages: Tensor, table: PageTable, batched: bool) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield each row's queries as a slice, and its keys and values ``[1, K, L, D]`` gathered from its pages."""
    # If ``batched``, rows next to each other come as one batch, if all of their tokens are new ones, and as many.
    page_size, head_dim = pages.shape[-2], query.shape[2]
    starts, ends = table.qo_indptr.tolist(), table.indptr.tolist()
    queries = [stop - start for start, stop in itertools.pairwise(starts)]
    counts = [end - first for first, end in itertools.pairwise(ends)]
    lengths = [(count - 1) * page_size + last for count, last in zip(counts, table.last_page_len.tolist(), strict=True)]

    def batch_of(row: int) -> tuple[int, int]:
        return queries[row], -1 if batched and queries[row] == lengths[row] else row

    for (new, _), run in itertools.groupby(range(len(lengths)), batch_of):
        if new:
            rows = [*run]
            first, end, length = rows[0], rows[-1] + 1, lengths[rows[0]]
            numbers = table.indices[ends[first] : ends[end]].reshape(len(rows), -1)
            keys, values = gather(pages, numbers, head_dim, query.dtype)
            yield slice(starts[first], starts[end]), keys[:, :, :length], values[:, :, :length]


def _visible(queries: int, length: int, window_left: int, device: torch.device) -> Tensor | None:
    """``[Q, L]`` bool: which keys each query sees; None if it sees all. The last query sees the last key."""
    if queries == 1 and not 0 <= window_left < length - 1:
        return None
    positions = torch.arange(length, device=device)
    distance = positions[length - queries :, None] - positions[None, :]
    return (distance >= 0) if window_left < 0 else (distance >= 0) & (distance <= window_left)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, window_left: int) -> Tensor:
    """``[B * Q, H, D]``, D that of the values, from ``query`` likewise, and ``keys``, ``values`` ``[B, K, L, D]``."""
    batch, kv_heads, length, _ = keys.shape
    queries, group = query.shape[0] // batch, query.shape[1] // kv_heads
    whole = queries == length and window_left < 0
    # A group of heads is a batch of its own, over keys and values that are not repeated in memory.
    out: Tensor = torch.nn.functional.scaled_dot_product_attention(
        query.unflatten(0, (batch, queries)).unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(0, 1),
        keys.flatten(0, 1)[:, None].expand(-1, group, -1, -1),
        values.flatten(0, 1)[:, None].expand(-1, group, -1, -1),
        attn_mask=None if whole else _visible(queries, length, window_left, query.device),
        is_causal=whole,
        scale=scale,
    )
    packed: Tensor = out.unflatten(0, (batch, kv_heads)).permute(0, 3, 1, 2, 4)
    return packed.flatten(2, 3).flatten(0, 1)


def attend_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    visible: Tensor | None,
    logits_soft_cap: float,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``[Q, H, D]`` and ``[Q, H]``, the log-sum-exp in base 2; arithmetic in float32."""
    # ``key`` and ``value`` are ``[K, L, D]``, ``visible`` ``[Q, L]``, the scales of keys and values ``[K]``. A query
    # that sees no key has zeros, and minus infinity.
    queries, heads, head_dim = query.shape
    kv_heads = key.shape[0]
    grouped = query.float().view(queries, kv_heads, heads // kv_heads, head_dim)
    logits = torch.einsum("qkgd,kld->qkgl", grouped, key.float()) * scale
    if key_scale is not None:
        logits = logits * key_scale[:, None, None]
    if logits_soft_cap > 0:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None, None, :], -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = torch.einsum("qkgl,kld->qkgd", weights, value.float())
    if value_scale is not None:
        out = out * value_scale[:, None, None]
    return out.reshape(queries, heads, -1), lse.reshape(queries, heads) / math.log(2)


def attend_row_by_row(
    query: Tensor,
    pages: Tensor,
    table: PageTable,
    scale: float,
    window_left: int,
    logits_soft_cap: float,
    wants_lse: bool,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return ``[T, H, D]``, ``into`` if that is given, and if ``wants_lse``, the log-sum-exp ``[T, H]`` in base 2."""
    out = query.new_empty((*query.shape[:2], value_size(query, pages))) if into is None else into
    lse = query.new_empty(query.shape[:2], dtype=torch.float32) if wants_lse else None
    apart = wants_lse or logits_soft_cap > 0
    for tokens, stored_keys, stored_values in _rows(query, pages, table, batched=not apart):
        own, keys, values = query[tokens], scaled(stored_keys, key_scale), scaled(stored_values, value_scale)
        if keys.dtype != values.dtype or keys.dtype != own.dtype:
            own, keys, values = own.float(), keys.float(), values.float()
        if apart:
            visible = _visible(tokens.stop - tokens.start, keys.shape[2], window_left, query.device)
            out[tokens], own_lse = attend_lse(own, keys[0], values[0], scale, visible, logits_soft_cap)
            if lse is not None:
                lse[tokens] = own_lse
        else:
            out[tokens] = _attend(own, keys, values, scale, window_left)
    return out, lse


def attend_to_listed(
    query: Tensor, args: DecodeAttention, visible: Tensor, numbers: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return ``[T, H, D]`` and the log-sum-exp ``[T, H]``, over the pages that ``visible`` ``[B, K, n]`` lists."""
    # The queries are prepared, and all keys written. ``numbers`` are those of each row's pages.
    new, page_size = args.new_tokens, args.pages.shape[-2]
    group = query.shape[1] // visible.shape[1]
    out = torch.empty((*query.shape[:2], value_size(query, args.pages)), dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    for (row, length), head in itertools.product(enumerate(args.lengths.tolist()), range(visible.shape[1])):
        first_new, end = (length - new) // page_size, -(-length // page_size)
        listed = {page for page in visible[row, head].tolist() if 0 <= page < first_new}
        own = torch.tensor([*sorted(listed), *range(first_new, end)], device=query.device)
        positions = (own[:, None] * page_size + torch.arange(page_size, device=query.device)).flatten()
        written = positions < length
        distance = torch.arange(length - new, length, device=query.device)[:, None] - positions[written]
        seen = (distance >= 0) & ((distance <= args.window_left) | (args.window_left < 0))
        keys, values = (
            states[head, written][None] for states in gather(args.pages, numbers[row][own], query.shape[2], query.dtype)
        )
        scales = (scale if scale is None else scale[head : head + 1] for scale in (args.key_scale, args.value_scale))
        tokens, heads = slice(row * new, (row + 1) * new), slice(head * group, (head + 1) * group)
        found = attend_lse(query[tokens, heads], keys, values, args.scale, seen, args.logits_soft_cap, *scales)
        out[tokens, heads], lse[tokens, heads] = found[0].to(query.dtype), found[1]
    return out, lse


def scaled(stored: Tensor, scale: Tensor | None) -> Tensor:
    """Return what numbers ``[..., K, L, D]``, as they are stored, stand for: float32 if there is a ``scale``."""
    return stored if scale is None else stored.float() * scale[:, None, None]


def append(args: AppendPagedKv) -> None:
    """Write the keys and values of new tokens; see ``append_paged_kv``."""
    page_size = args.pages.shape[-2]
    rows, positions, indptr, indices = as_arrays(args.token_rows, args.token_positions, args.indptr, args.indices)
    page = indices[indptr[rows] + positions // page_size]
    device = args.pages.device
    slots = torch.as_tensor(positions % page_size, device=device)
    store(args, torch.as_tensor(page, device=device), slots, args.key)


def as_arrays(*integers: Tensor) -> tuple[Any, ...]:
    """Return tensors as NumPy's arrays if they are on a CPU, else as they are: with few numbers, NumPy is faster."""
    return tuple(tensor if tensor.is_cuda else tensor.numpy() for tensor in integers)


def store(args: Writes, numbers: Tensor, slots: Tensor, key: Tensor) -> None:
    """Write keys ``[T, K, D]`` and the values of ``args`` at ``slots`` ``[T]`` of its pages ``numbers`` ``[T]``."""
    pages, value = args.pages, args.value
    if has_uneven_heads(pages):
        pages[numbers, :, slots] = torch.cat([key, value], dim=2).to(pages.dtype)
    else:
        states = as_stored(torch.stack([key, value], dim=1), args)
        as_bytes(pages)[numbers, :, :, slots, : key.shape[2]] = as_bytes(states)


def as_stored(states: Tensor, args: Writes) -> Tensor:
    """Return keys and values ``[T, 2, K, D]`` as the pages of ``args`` hold them; add to its count of clamped ones."""
    if args.pages.dtype not in SCALED_DTYPES:
        return states.to(args.pages.dtype)
    return divided(states, args.pages.dtype, args.key_scale, args.value_scale, args.saturated)


def divided(
    states: Tensor, dtype: torch.dtype, key_scale: Tensor | None, value_scale: Tensor | None, saturated: Tensor | None
) -> Tensor:
    """Return keys and values ``[T, 2, K, D]`` as pages of a dtype with scales hold them; see ``append_paged_kv``."""
    largest = SCALED_DTYPES[dtype]
    numbers = states.to(torch.float32, copy=True)
    for which, scale in enumerate((key_scale, value_scale)):
        if scale is not None:
            numbers[:, which] = numbers[:, which] / scale[:, None]
    if saturated is not None:
        saturated.add_((numbers.abs() > largest).sum())
    numbers = numbers.clamp(-largest, largest)
    return (numbers if dtype.is_floating_point else numbers.round()).to(dtype)


def as_bytes(pages: Tensor) -> Tensor:
    """Return pages with scales as uint8, which CPUs can index and move in any torch; others as they are."""
    return pages.view(torch.uint8) if pages.dtype in SCALED_DTYPES else pages
