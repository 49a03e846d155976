"""Batch-invariant attention over pages in plain PyTorch: tiles of constant shapes, so that each is computed alike."""

# Shapes: T packed tokens, H query heads, K kv heads, G query heads of one kv head, D head dimension, L tokens of one
# row, Q queries of one row.

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_llm_ops.contracts import DecodeAttention, PagedAttention
from compiled_llm_ops.plain_attention import gather

TILE_TOKENS = 8  # tokens of a row that attend together; a tile with fewer is filled up

TILE_KEYS = 64  # keys of a block, counted from the row's first one


def attend_row_by_row(args: PagedAttention, out: Tensor, lse: Tensor | None) -> None:
    """Attend with packed queries in plain PyTorch, into ``out`` ``[T, H, D]`` and, if given, ``lse`` ``[T, H]``."""
    page_size = args.pages.shape[-2]
    begins, firsts = args.qo_indptr.tolist(), args.indptr.tolist()
    for row, last in enumerate(args.last_page_len.tolist()):
        numbers = args.indices[firsts[row] : firsts[row + 1]]
        tokens = slice(begins[row], begins[row + 1])
        attend_row(args, args.query[tokens], numbers, (len(numbers) - 1) * page_size + last, out[tokens],
                    None if lse is None else lse[tokens])  # fmt: skip


def attend_row(
    args: DecodeAttention | PagedAttention,
    query: Tensor,
    numbers: Tensor,
    length: int,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attend with a row's last tokens ``[Q, H, D]`` over ``length`` tokens in the pages ``numbers``."""
    queries, heads, head_dim = query.shape
    if not queries:
        return
    keys, values = gather(args.pages, numbers, head_dim, query.dtype)
    # Pages before all windows may be free, and hold values (NaN) whose product with zero is not zero.
    first = max(0, length - queries - args.window_left) if args.window_left >= 0 else 0
    blocks = [_in_blocks(states[:, :length].float(), first) for states in (keys, values)]
    for start in range(0, queries, TILE_TOKENS):
        end = min(queries, start + TILE_TOKENS)
        position = torch.arange(length - queries + start, length - queries + start + TILE_TOKENS, device="cpu")
        tile = torch.zeros((TILE_TOKENS, heads, head_dim), dtype=torch.float32, device="cpu")
        tile[: end - start] = query[start:end]
        result, sums = _attend_tile(args, tile, position.clamp(max=length - 1), *blocks)
        out[start:end] = result[: end - start]
        if lse is not None:
            lse[start:end] = sums[: end - start]


def _in_blocks(states: Tensor, first: int) -> Tensor:
    """Return ``[K, L, D]`` as ``[L', K, TILE_KEYS, D]``, with zeros before ``first`` and where they end."""
    kv_heads, length, size = states.shape
    padded = torch.nn.functional.pad(states[:, first:], (0, 0, first, -length % TILE_KEYS))
    return padded.view(kv_heads, -1, TILE_KEYS, size).transpose(0, 1).contiguous()


def _attend_tile(
    args: DecodeAttention | PagedAttention, tile: Tensor, position: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the results ``[TILE_TOKENS, H, D]`` of queries at these positions, and their log-sum-exps in base 2."""
    # The largest logit of a query is exact in any order; weights and their sums are added block by block.
    tokens, heads, head_dim = tile.shape
    kv_heads, group = keys.shape[1], heads // keys.shape[1]
    query = tile.view(tokens, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, tokens * group, head_dim)
    nearest = position - args.window_left if args.window_left >= 0 else torch.zeros_like(position)
    first, last = max(0, int(nearest.min())) // TILE_KEYS, int(position.max()) // TILE_KEYS
    logits = []
    for block in range(first, last + 1):
        at = torch.arange(block * TILE_KEYS, (block + 1) * TILE_KEYS, device="cpu")
        seen = (at <= position[:, None]) & (at >= nearest[:, None])
        raw = torch.bmm(query, keys[block].transpose(1, 2)) * args.scale
        if args.key_scale is not None:
            raw = raw * args.key_scale[:, None, None]
        if args.logits_soft_cap > 0:
            raw = args.logits_soft_cap * torch.tanh(raw / args.logits_soft_cap)
        logits.append(raw.masked_fill_(~seen.repeat_interleave(group, 0), -math.inf))
    largest = torch.stack([block.amax(-1, keepdim=True) for block in logits]).amax(0)
    total = torch.zeros_like(largest)
    result = torch.zeros((*query.shape[:2], values.shape[-1]), dtype=torch.float32, device="cpu")
    for block, own in enumerate(logits, first):
        weights = torch.exp(own - largest)
        total += weights.sum(-1, keepdim=True)
        result += torch.bmm(weights, values[block])
    result = result / total
    if args.value_scale is not None:
        result = result * args.value_scale[:, None, None]
    sums = (largest + torch.log(total)) / math.log(2)
    by_token = (states.unflatten(1, (tokens, group)).transpose(0, 1).flatten(1, 2) for states in (result, sums))
    result, sums = by_token
    return result, sums[..., 0]
