"""What the ops of attention by variants take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_llm_ops.contracts import DecodeAttention, Geometry, common_fields, geometry_of


class PagedAttentionVariant(NamedTuple):
    query: Tensor
    pages: Tensor
    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    name: str
    tensors: list[Tensor]
    scale: float
    window_left: int = -1
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


class PlannedAttentionVariant(NamedTuple):
    query: Tensor
    pages: Tensor
    qo_indptr: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    plan: Tensor
    workspace: Tensor
    name: str
    tensors: list[Tensor]
    scale: float
    window_left: int = -1
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def geometry(self) -> Geometry:
        """The geometry of a launch, whose ``name`` is a key."""
        op = "planned_attention_variant"
        return geometry_of(op, self.query, self.pages, self.window_left, function=self.name)


class DecodeAttentionVariant(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    pages: Tensor
    starts: Tensor
    lengths: Tensor
    indices: Tensor
    name: str
    tensors: list[Tensor]
    scale: float
    window_left: int = -1
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
    def without_variant(self) -> DecodeAttention:
        """The same without a variant."""
        return DecodeAttention(**common_fields(self, DecodeAttention))
