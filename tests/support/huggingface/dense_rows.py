"""Attention of packed rows over all tokens that they have had, without pages: what stands beside states in tests.

Shapes: T packed tokens, H query heads, D head size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from compiled_llm.model.layers.recurrent import StateRows

NAME = "dense_rows"


class DenseRows:
    """The keys and values of each layer and row."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, rows: StateRows, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return ``[T, H, D]``, for queries, keys and values of new tokens."""
        out = torch.zeros(*query.shape[:2], value.shape[2])
        for row, (begin, end) in enumerate(pairwise(rows.qo_indptr.tolist())):
            before = self._held.get((layer, row), (key[:0], value[:0]))
            keys, values = (torch.cat([held, new[begin:end]]) for held, new in zip(before, (key, value), strict=True))
            self._held[layer, row] = keys, values
            states = (
                query[begin:end],
                *(each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (keys, values)),
            )
            mask = torch.ones(end - begin, len(keys), dtype=torch.bool).tril(len(keys) - (end - begin))
            out[begin:end] = torch.nn.functional.scaled_dot_product_attention(
                *(each.transpose(0, 1) for each in states), attn_mask=mask, scale=scale
            ).transpose(0, 1)
        return out


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, dense: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    held, rows = dense
    packed = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    out = held.attend(module.layer_idx, rows, *packed, scaling)
    return out.unflatten(0, (query.shape[0], query.shape[2])), None


AttentionInterface.register(NAME, _attention)
