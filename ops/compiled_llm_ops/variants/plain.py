"""Variants of attention over pages in plain PyTorch: the CPU kernels, and the reference for all others."""

# Shapes: T packed tokens, B rows, H query heads, K kv heads, D head dimension, L tokens of one row, Q queries of one
# row.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.plain_attention import gather, scaled
from compiled_llm_ops.variants.contracts import PagedAttentionVariant, PlannedAttentionVariant
from compiled_llm_ops.variants.expressions import Expression, Type
from compiled_llm_ops.variants.registry import Variant

MOST_LOGITS = 2**22  # logits that are in memory at a time

_DTYPES: dict[Type, torch.dtype] = {"float": torch.float32, "int": torch.int32, "bool": torch.bool}

_COMPUTED: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "minimum", "maximum", "neg", "abs")},
    **{name: getattr(torch, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "where")},
    **{name: getattr(torch, name) for name in ("exp", "exp2", "log", "log2", "sqrt", "tanh", "sigmoid")},
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "and": torch.logical_and,
    "or": torch.logical_or,
    "xor": torch.logical_xor,
    "not": torch.logical_not,
    "float": lambda number: number.to(torch.float32),
    "int": lambda number: number.to(torch.int32),
}


class PlainRow(NamedTuple):
    """One row's queries, and all of its keys."""

    number: int  # of the row in the batch
    tokens: slice  # of its queries in the batch, its last ones
    length: int
    pages: Tensor  # ``[n]``, page numbers


def attend(
    variant: Variant,
    tensors: Sequence[Tensor],
    query: Tensor,
    pages: Tensor,
    rows: Sequence[PlainRow],
    scale: float,
    window_left: int,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return ``[T, H, E]``, E the size of values, and the log-sum-exp ``[T, H]`` in base 2; arithmetic in float32."""
    heads, head_dim = query.shape[1:]
    parts, sums = [], []
    for row in rows:
        keys, values = gather(pages, row.pages, head_dim, query.dtype)
        keys, values = (
            scaled(states[:, : row.length], own).float().repeat_interleave(heads // keys.shape[0], 0)
            for states, own in ((keys, key_scale), (values, value_scale))
        )
        for tokens in _blocks(row, heads):
            logits = torch.einsum("qhd,hld->qhl", query[tokens].float(), keys) * scale
            seen, logits = _transformed(variant, tensors, logits, row, tokens, window_left)
            part, total = _summed(variant, logits, seen, values)
            parts.append(part)
            sums.append(total)
    if not parts:
        size = pages.shape[3] - head_dim if pages.dim() == 4 else head_dim
        return query.new_empty((0, heads, size)), query.new_empty((0, heads), dtype=torch.float32)
    return torch.cat(parts).to(query.dtype), torch.cat(sums)


def attend_packed(variant: Variant, args: PagedAttentionVariant | PlannedAttentionVariant) -> tuple[Tensor, Tensor]:
    """Return what ``attend`` does for packed queries; it reads where rows begin from the device."""
    page_size, begins, firsts = args.pages.shape[-2], args.qo_indptr.tolist(), args.indptr.tolist()
    rows = [
        PlainRow(
            row,
            slice(begins[row], begins[row + 1]),
            (firsts[row + 1] - firsts[row] - 1) * page_size + last,
            args.indices[firsts[row] : firsts[row + 1]],
        )
        for row, last in enumerate(args.last_page_len.tolist())
        if begins[row] < begins[row + 1]
    ]
    how = (args.scale, args.window_left, args.key_scale, args.value_scale)
    return attend(variant, args.tensors, args.query, args.pages, rows, *how)


def _blocks(row: PlainRow, heads: int) -> Iterator[slice]:
    size = max(1, MOST_LOGITS // (heads * row.length))
    for start in range(row.tokens.start, row.tokens.stop, size):
        yield slice(start, min(row.tokens.stop, start + size))


def _transformed(
    variant: Variant, tensors: Sequence[Tensor], logits: Tensor, row: PlainRow, tokens: slice, window_left: int
) -> tuple[Tensor, Tensor]:
    """Return which keys each query sees, ``[Q, H, L]`` or less, and the logits ``[Q, H, L]``."""
    device = logits.device
    queries = torch.arange(tokens.start, tokens.stop, dtype=torch.int32, device=device)[:, None, None]
    query_position = queries + (row.length - row.tokens.stop)
    key_position = torch.arange(row.length, dtype=torch.int32, device=device)
    inputs = {
        "logit": logits,
        "row": torch.tensor(row.number, dtype=torch.int32, device=device),
        "head": torch.arange(logits.shape[1], dtype=torch.int32, device=device)[:, None],
        "query_position": query_position,
        "key_position": key_position,
    }
    seen = key_position <= query_position
    if window_left >= 0:
        seen = seen & (key_position >= query_position - window_left)
    if variant.visible is not None:
        seen = seen & evaluated(variant, variant.visible, inputs, tensors, queries)
    if variant.logits is not None:
        logits = evaluated(variant, variant.logits, inputs, tensors, queries).expand_as(logits)
    return seen, logits


def evaluated(
    variant: Variant, expression: Expression, inputs: dict[str, Tensor], tensors: Sequence[Tensor], queries: Tensor
) -> Tensor:
    """Return what an expression is for inputs that broadcast; ``queries`` are their numbers in the batch."""
    given = {own.name: (own, tensor) for own, tensor in zip(variant.tensors, tensors, strict=True)}
    device = queries.device

    def read(name: str, indices: Sequence[Tensor]) -> Tensor:
        own, tensor = given[name]
        whole = [queries, *indices] if own.axes[0] == "query" else [*indices]
        inside = torch.tensor(True, device=device)
        places = []
        for index, size in zip(whole, tensor.shape, strict=True):
            inside = inside & (index >= 0) & (index < size)
            places.append(index.clamp(0, max(0, size - 1)).long())
        if not tensor.numel():
            return torch.zeros((), dtype=tensor.dtype, device=device)
        entry = tensor[tuple(places)]
        entry = torch.where(inside, entry, torch.zeros_like(entry))
        if entry.dtype == torch.bool:
            return entry
        return entry.to(torch.float32 if entry.is_floating_point() else torch.int32)

    def constant(value: Any, type: Type) -> Tensor:
        return torch.tensor(value, dtype=_DTYPES[type], device=device)

    def compute(name: str, operands: Sequence[Tensor], type: Type) -> Tensor:
        return _COMPUTED[name](*operands)

    return expression.evaluate(inputs, read, constant, compute)


def _summed(variant: Variant, logits: Tensor, seen: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``[Q, H, E]`` and the log-sum-exp ``[Q, H]`` in base 2; without a softmax, that is 0."""
    if not variant.softmax:
        weights = torch.where(seen, logits, 0.0)
        return torch.einsum("qhl,hld->qhd", weights, values), weights.new_zeros(weights.shape[:2])
    logits = torch.where(seen, logits, -math.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.einsum("qhl,hld->qhd", weights, values), lse / math.log(2)
