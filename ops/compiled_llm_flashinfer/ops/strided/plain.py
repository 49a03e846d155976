"""Attention over keys and values that lie apart, in plain PyTorch: the CPU kernel; arithmetic is float32."""

# Shapes: T packed tokens, B rows, H query heads, K kv heads, G query heads of one kv head, D head dimension of queries
# and keys, E that of values, L tokens of one row, Q queries of one row.

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_flashinfer.ops.contracts import StridedAttention
from compiled_llm_ops.contracts import FP8, FP8_LARGEST

MOST_LOGITS = 2**22  # logits that are in memory at a time


class StridedRow(NamedTuple):
    """One row: its number, its queries, its pages as ``keys[pages]``, and how many of their tokens are its own."""

    number: int
    tokens: slice
    pages: Tensor | slice
    length: int


def attend_row_by_row(args: StridedAttention) -> None:
    """Attend, checked, into ``out`` and ``lse``."""
    for row in _rows(args):
        keys, values = (_tokens_of(states, row) for states in (args.keys, args.values))
        if args.rope_scale:
            keys = rotated(keys, torch.arange(row.length, device=keys.device), args)
        if args.window_left >= 0:
            # Pages before all windows may be free, and hold values (NaN) whose product with zero is not zero.
            queries = row.tokens.stop - row.tokens.start
            before = torch.arange(row.length, device=values.device) < row.length - queries - args.window_left
            values = values.masked_fill(before[:, None], 0.0)
        step = max(1, MOST_LOGITS // (args.query.shape[1] * max(1, row.length)))
        for start in range(row.tokens.start, row.tokens.stop, step):
            _attend(args, row, slice(start, min(row.tokens.stop, start + step)), keys, values)


def _rows(args: StridedAttention) -> Iterator[StridedRow]:
    rows, page_size = args.rows, args.keys.shape[2]
    new = args.query.shape[0] // max(1, rows)
    begins = [row * new for row in range(rows + 1)] if args.qo_indptr is None else args.qo_indptr.tolist()
    firsts = [0, args.keys.shape[0]] if args.indptr is None else args.indptr.tolist()
    lasts = None if args.last_page_len is None else args.last_page_len.tolist()
    if begins[-1] > args.query.shape[0]:
        raise ValueError(
            f"strided_attention: qo_indptr ends at {begins[-1]}, after the last of {len(args.query)} tokens"
        )
    for row in range(rows):
        pages = firsts[row + 1] - firsts[row]
        own = slice(firsts[row], firsts[row + 1])
        length = 0 if not pages else pages * page_size if lasts is None else (pages - 1) * page_size + lasts[row]
        numbers = own if args.indices is None else args.indices[own]
        yield StridedRow(row, slice(begins[row], begins[row + 1]), numbers, length)


def _tokens_of(states: Tensor, row: StridedRow) -> Tensor:
    """Return a row's keys or values as ``[K, L, D]`` float32."""
    own = as_bytes(states)[row.pages].view(states.dtype)
    return own.transpose(0, 1).flatten(1, 2)[:, : row.length].float()


def rotated(states: Tensor, positions: Tensor, args: StridedAttention) -> Tensor:
    """Return ``[..., L, D]`` rotated by ``positions`` ``[L]``, the second half of a head against the first."""
    half = states.shape[-1] // 2
    exponents = torch.arange(half, device=states.device, dtype=torch.float32) / half
    angles = positions[:, None] / args.rope_scale * args.rope_theta**-exponents
    cos, sin = angles.cos(), angles.sin()
    first, second = states[..., :half], states[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _attend(args: StridedAttention, row: StridedRow, tokens: slice, keys: Tensor, values: Tensor) -> None:
    kv_heads, heads = keys.shape[0], args.query.shape[1]
    numbers = torch.arange(tokens.start, tokens.stop, device=keys.device) - row.tokens.start
    positions = numbers + row.length - (row.tokens.stop - row.tokens.start)
    query = args.query[tokens].float().transpose(0, 1)  # [H, Q, D]
    if args.rope_scale:
        query = rotated(query, positions, args)
    grouped = query.reshape(kv_heads, -1, query.shape[2])  # [K, G * Q, D]
    logits = torch.bmm(grouped, keys.transpose(1, 2)).view(heads, len(numbers), row.length)
    logits = _transformed(args, logits, numbers)
    seen = _seen(args, row, numbers, positions)
    if seen is not None:
        logits = logits.masked_fill_(~seen, -math.inf)
    lse = torch.logsumexp(logits, -1) if row.length else logits.new_full(logits.shape[:2], -math.inf)
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = torch.bmm(weights.view(kv_heads, grouped.shape[1], row.length), values).view(heads, len(numbers), -1)
    out = out * args.value_scale
    if args.value_factors is not None:
        out = out * args.value_factors[:, None, None]
    _store(args.out, tokens, out.transpose(0, 1))
    if args.lse is not None:
        args.lse[tokens] = lse.transpose(0, 1) / math.log(2)


def _transformed(args: StridedAttention, logits: Tensor, numbers: Tensor) -> Tensor:
    """Return logits ``[H, Q, L]`` scaled, biased by distances and capped."""
    logits = logits * args.scale
    if args.logit_factors is not None:
        logits = logits * args.logit_factors[:, None, None]
    if args.slopes is not None:
        distance = torch.arange(logits.shape[2], device=logits.device) - numbers[:, None]
        logits = logits + args.slopes[:, None, None] * distance
    if args.logits_soft_cap > 0:
        logits = args.logits_soft_cap * torch.tanh(logits / args.logits_soft_cap)
    return logits


def _seen(args: StridedAttention, row: StridedRow, numbers: Tensor, positions: Tensor) -> Tensor | None:
    """Return which keys each query sees, ``[Q, L]``; None if all see all."""
    key_positions, seen = torch.arange(row.length, device=numbers.device), None
    if args.mask is not None:
        begin = 0 if args.mask_indptr is None else int(args.mask_indptr[row.number])
        bit = numbers[:, None] * row.length + key_positions
        seen = (args.mask[begin + bit // 8] >> (bit % 8)) & 1 == 1
    elif args.causal:
        seen = key_positions <= positions[:, None]
    if args.window_left >= 0:
        near = key_positions >= positions[:, None] - args.window_left
        seen = near if seen is None else seen & near
    return seen


def _store(out: Tensor, tokens: slice, results: Tensor) -> None:
    if out.dtype == FP8:
        results = results.clamp(-FP8_LARGEST, FP8_LARGEST)
    as_bytes(out)[tokens] = as_bytes(results.to(out.dtype))


def as_bytes(states: Tensor) -> Tensor:
    """Return states of fp8 as uint8, which CPUs can index in any version of torch; others as they are."""
    return states.view(torch.uint8) if states.dtype.itemsize == 1 else states
