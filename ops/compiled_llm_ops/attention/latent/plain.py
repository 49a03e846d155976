"""Latent attention in plain PyTorch: the CPU kernels, and checks of arguments that all latent ops share."""

# Shapes: T packed tokens, B rows, H query heads, R latent size, E size of the rotated part, P pages, S page size, L
# tokens of one row in the cache, Q queries of one row.

from __future__ import annotations

import math

import torch
from torch import Tensor

from compiled_llm_ops.contracts import check_int32
from compiled_llm_ops.contracts.latent import LatentAttention, LatentDecode, PlannedLatentAttention

Queries = LatentAttention | LatentDecode | PlannedLatentAttention  # arguments with absorbed queries

BLOCK = 64  # keys of a block in the order of sums that does not depend on the batch

LOGITS_AT_ONCE = 2**22  # so many are computed at a time: those of a long prompt of 128 heads would not fit in memory


def check_latents(op: str, latent: Tensor, rope: Tensor, pages: Tensor) -> None:
    """Raise ValueError if latents ``[T, R]`` and rotated parts ``[T, E]`` do not fit the pages ``[P, S, R + E]``."""
    alike = latent.shape[:-1] == rope.shape[:-1] and latent.dtype == rope.dtype and latent.device == rope.device
    if not alike or pages.dim() != 3 or pages.shape[2] != latent.shape[-1] + rope.shape[-1] or not rope.shape[-1]:
        raise ValueError(
            f"{op}: pages must be [P, S, {latent.shape[-1]} + {rope.shape[-1]}] for a latent of {tuple(latent.shape)} "
            f"{latent.dtype} and a rotated part of {tuple(rope.shape)} {rope.dtype}; got {tuple(pages.shape)}"
        )


def check_latent_queries(op: str, args: Queries) -> None:
    """Raise ValueError if absorbed queries do not fit each other and the pages."""
    latent, rope = args.query_latent, args.query_rope
    if latent.dim() != 3 or rope.dim() != 3:
        raise ValueError(
            f"{op}: query_latent must be [T, H, R] and query_rope [T, H, E]; got {tuple(latent.shape)} and "
            f"{tuple(rope.shape)}"
        )
    check_latents(op, latent, rope, args.pages)
    if not isinstance(args, PlannedLatentAttention) and args.chosen is not None:
        _check_chosen(op, args.chosen, len(latent), args.pages)
        if args.invariant:
            raise ValueError(f"{op}: invariant must be False with chosen, whose order may be any")


def _check_chosen(op: str, chosen: Tensor, tokens: int, pages: Tensor) -> None:
    slots = pages.shape[0] * pages.shape[1]
    fits = chosen.dim() == 2 and chosen.shape[0] == tokens and 1 <= chosen.shape[1] <= slots
    if not fits or chosen.device != pages.device:
        raise ValueError(
            f"{op}: chosen must be [{tokens}, n] on {pages.device}, with n from 1 to the {slots} tokens that the pages "
            f"hold; got {tuple(chosen.shape)} on {chosen.device}"
        )
    check_int32(op, chosen=chosen)


def store(latent: Tensor, rope: Tensor, pages: Tensor, numbers: Tensor, slots: Tensor) -> None:
    """Write latents ``[T, R]``, rotated parts ``[T, E]`` behind them, at ``slots`` ``[T]`` of pages ``numbers``."""
    pages[numbers.long(), slots.long()] = torch.cat([latent, rope], dim=-1).to(pages.dtype)


def attend(
    query: Tensor, cached: Tensor, positions: Tensor, rank: int, scale: float, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``[Q, H, R]`` and the log-sum-exps ``[Q, H]`` in base 2, of queries ``[Q, H, R + E]`` of one row."""
    # Arithmetic is in float32 at least. Each query sees the keys of ``cached`` ``[L, R + E]`` up to its position
    # ``[Q]``, of these only those at positions ``chosen`` ``[Q, n]`` if they are given; one that sees none has zeros,
    # and minus infinity.
    dtype = torch.promote_types(cached.dtype, torch.float32)
    keys, seen = cached.to(dtype), torch.arange(len(cached), device=cached.device)
    if chosen is not None:
        most = max(1, LOGITS_AT_ONCE // (chosen.shape[1] * cached.shape[1]))
        parts = [
            _attend_to_chosen(*part, keys, rank, scale)
            for part in zip(query.to(dtype).split(most), positions.split(most), chosen.split(most), strict=True)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
    most = max(1, LOGITS_AT_ONCE // max(1, len(cached) * query.shape[1]))
    parts = [
        _attend(*part, keys, seen, rank, scale)
        for part in zip(query.to(dtype).split(most), positions.split(most), strict=True)
    ]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def _attend_to_chosen(
    query: Tensor, positions: Tensor, chosen: Tensor, keys: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over keys that are gathered for each query: what it does not read may be NaN."""
    legal = (chosen >= 0) & (chosen <= positions[:, None])
    own = keys.new_zeros((*chosen.shape, keys.shape[1]))
    own[legal] = keys[chosen[legal].long()]
    logits = torch.einsum("qhr,qnr->qhn", query, own) * scale
    return _weighted(logits.masked_fill(~legal[:, None], -math.inf), own[..., :rank])


def _attend(
    query: Tensor, positions: Tensor, keys: Tensor, seen: Tensor, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    logits = torch.matmul(query, keys.T) * scale
    return _weighted(logits.masked_fill(seen > positions[:, None, None], -math.inf), keys[:, :rank])


def _weighted(logits: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.matmul(weights, latents), lse / math.log(2)


def _attend_one_by_one(
    query: Tensor, cached: Tensor, positions: list[int], rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """``attend`` by products of the same shapes for each query: over blocks of keys that begin at fixed positions."""
    dtype = torch.promote_types(cached.dtype, torch.float32)
    blocks = torch.nn.functional.pad(cached.to(dtype), (0, 0, 0, -len(cached) % BLOCK)).split(BLOCK)
    out, lse = query.new_zeros((*query.shape[:2], rank)), query.new_full(query.shape[:2], -math.inf, dtype=dtype)
    for number, (states, last) in enumerate(zip(query, positions, strict=True)):
        if last < 0:
            continue
        own, seen = states.to(dtype, copy=True), blocks[: last // BLOCK + 1]
        logits = [torch.mm(own, keys.T) * scale for keys in seen]
        logits[-1][:, last % BLOCK + 1 :] = -math.inf
        largest = torch.stack([part.amax(-1, keepdim=True) for part in logits]).amax(0)
        total, result = torch.zeros_like(largest), own.new_zeros((len(own), rank))
        for part, keys in zip(logits, seen, strict=True):
            weights = torch.exp(part - largest)
            total += weights.sum(-1, keepdim=True)
            result += torch.mm(weights, keys[:, :rank])
        out[number], lse[number] = (result / total).to(out.dtype), ((largest + torch.log(total)) / math.log(2))[:, 0]
    return out, lse


def attend_in_pages(args: Queries, rows: list[tuple[slice, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return ``[T, H, R]`` of the queries' dtype, and ``[T, H]`` float32, the log-sum-exp in base 2."""
    # Each of ``rows`` has its queries as a slice, their positions ``[Q]``, and the numbers of its pages.
    query, rank = torch.cat([args.query_latent, args.query_rope], dim=-1), args.query_latent.shape[2]
    out = torch.zeros(args.query_latent.shape, dtype=query.dtype, device=query.device)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float32, device=query.device)
    for tokens, positions, numbers in rows:
        cached = args.pages[numbers.long()].flatten(0, 1)[: int(positions.max()) + 1]
        if not isinstance(args, PlannedLatentAttention) and args.invariant:
            out[tokens], lse[tokens] = _attend_one_by_one(query[tokens], cached, positions.tolist(), rank, args.scale)
            continue
        chosen = None if isinstance(args, PlannedLatentAttention) or args.chosen is None else args.chosen[tokens]
        own, own_lse = attend(query[tokens], cached, positions, rank, args.scale, chosen)
        out[tokens], lse[tokens] = own.to(out.dtype), own_lse.float()
    return out, lse
