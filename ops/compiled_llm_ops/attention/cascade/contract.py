"""The arguments of ``cascade_attention``."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_llm_ops.contracts import DecodeAttention, common_fields
from compiled_llm_ops.contracts.devices import power_of_two

CASCADE_LEVELS = 3  # shared runs of pages that a row of ``cascade_attention`` may begin with, at most


class CascadeAttention(NamedTuple):
    """Those of ``decode_attention``, with tables of shared runs."""

    query: Tensor
    key: Tensor
    value: Tensor
    pages: Tensor
    starts: Tensor
    lengths: Tensor
    indices: Tensor
    shared_lengths: Tensor
    members: Tensor
    work_items: Tensor
    merge_parts: Tensor
    max_parts: int
    scale: float
    window_left: int = -1
    logits_soft_cap: float = 0.0
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    epsilon: float = 0.0
    cos: Tensor | None = None
    sin: Tensor | None = None
    overlap: bool = False
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    saturated: Tensor | None = None

    @property
    def whole_rows(self) -> DecodeAttention:
        """The same without shared runs."""
        return DecodeAttention(**common_fields(self, DecodeAttention))

    @property
    def row_queries(self) -> int:
        """Queries of a row and kv head as a tile holds them: G, the query heads of a kv head, as a power of two."""
        gqa = self.query.shape[1] // self.pages.shape[-3]
        return power_of_two(gqa)
