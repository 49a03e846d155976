"""What the ops of attention by variants take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compiled_llm_ops.contracts import DecodeAttention, Geometry, PageTable, check_even_heads


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

    @property
    def table(self) -> PageTable:
        return PageTable(self.qo_indptr, self.indptr, self.indices, self.last_page_len)


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
        check_even_heads("planned_attention_variant", self.pages)
        _, _, kv_heads, page_size, stored = self.pages.shape
        sizes = (self.query.shape[1], kv_heads, stored, page_size, self.window_left, 0.0)
        return Geometry(*sizes, self.query.dtype, self.pages.dtype, function=self.name)

    @property
    def table(self) -> PageTable:
        return PageTable(self.qo_indptr, self.indptr, self.indices, self.last_page_len)


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
        return DecodeAttention(**{name: own for name, own in self._asdict().items() if name in DecodeAttention._fields})
