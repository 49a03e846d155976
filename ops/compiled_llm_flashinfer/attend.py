"""One call of ``strided_attention`` for all of FlashInfer's functions: where tokens lie, and how logits are made."""

# Shapes: T packed tokens, B rows, H query heads, K kv heads, D head dimension of queries and keys, E that of values, P
# pages, S page size, N entries of the page table.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_flashinfer.arguments import Positions, Scale, positions, product, softmax_scale
from compiled_llm_flashinfer.ops.strided.attention import strided_attention


class BatchTable(NamedTuple):
    """Where rows lie, and what their queries see, as ``strided_attention`` takes it."""

    qo_indptr: Tensor | None = None  # ``[B + 1]``, where each row's queries begin; None if rows have equally many
    indptr: Tensor | None = None  # ``[B + 1]``, where each row's pages begin in ``indices``; None for one row
    indices: Tensor | None = None  # ``[N]``, page numbers; None if tokens lie next to each other
    last_page_len: Tensor | None = None  # ``[B]``, tokens in each row's last page; None if all are full
    mask: Tensor | None = None  # uint8, packed; None if there is none
    mask_indptr: Tensor | None = None  # ``[B + 1]``, where each row's bytes begin in ``mask``


class Logits(NamedTuple):
    """The way logits are made of queries and keys."""

    causal: bool  # whether queries see no keys after their own position; not read with a mask
    window_left: int
    logits_soft_cap: float  # ``cap * tanh(logits / cap)`` after scaling; 0.0 for none
    sm_scale: float | None
    positions: Positions  # what is added or rotated by position
    one_order: bool = False  # whether keys are summed in one order for any batch


def logits(
    heads: int,
    device: torch.device,
    *,
    causal: bool,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    one_order: bool = False,
) -> Logits:
    """Return how logits are made by FlashInfer's arguments; KeyError if there is no such ``pos_encoding_mode``."""
    own = positions(pos_encoding_mode, heads, device, rope_scale, rope_theta)
    return Logits(causal, window_left, logits_soft_cap or 0.0, sm_scale, own, one_order)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lse: Tensor | None,
    table: BatchTable,
    how: Logits,
    *,
    logit_scales: dict[str, Scale],
    value_scales: dict[str, Scale],
) -> None:
    """Attend with ``[T, H, D]`` to pages ``[P, K, S, D]`` and ``[P, K, S, E]``; write ``[T, H, E]`` and ``[T, H]``."""
    heads = query.shape[1]
    by_logit = product(heads, softmax_scale(how.sm_scale, query.shape[2]), logit_scales)
    by_value = product(heads, 1.0, value_scales)
    strided_attention(
        query, keys, values, out, lse, table.qo_indptr, table.indptr, table.indices, table.last_page_len,
        by_logit.number, how.causal and table.mask is None, how.window_left, how.logits_soft_cap, by_value.number,
        by_logit.factors, by_value.factors, table.mask, table.mask_indptr, *how.positions, how.one_order,
    )  # fmt: skip
