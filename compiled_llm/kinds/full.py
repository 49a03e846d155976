"""Layers that keep keys and values of one size; all tokens are kept, with a window, too."""

# Shapes as in ``kinds/spec.py``.

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import compiled_llm_ops as ops
from compiled_llm.kinds.kind import Attended, AttentionCall, Layer, LayerKind, Paging, SeenCall
from compiled_llm.kinds.rows import PackedTokens, Rows, UnpagedRows
from compiled_llm.kinds.spec import UNSCALED, KVCacheSpec, PageScales, TokenPlaces
from compiled_llm_ops import Geometry
from compiled_llm_ops.attention.latent.ragged import attend_on_cpu
from compiled_llm_ops.contracts import DecodeAttention
from compiled_llm_ops.contracts.latent import RaggedAttention


class FullAttentionSpec(NamedTuple):
    """Keys and values of one size, ``[P, 2, K, S, D]``."""

    kv_heads: int  # K
    head_dim: int  # of the model
    stored_head_dim: int  # D; the part that the model does not need stays zero
    page_size: int  # S
    dtype: torch.dtype  # of the model

    @property
    def scales(self) -> PageScales:
        return UNSCALED

    def shape(self, pages: int) -> tuple[int, ...]:
        return pages, 2, self.kv_heads, self.page_size, self.stored_head_dim

    def planned(self, geometry: Geometry) -> Geometry:
        return geometry._replace(head_dim=self.stored_head_dim)

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None:
        memory[places.pages, :, :, places.slots, : self.head_dim] = places.taken(torch.stack([keys, values]))

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        both = memory.index_select(0, pages).permute(1, 2, 0, 3, 4).flatten(2, 3)
        keys, values = both[:, :, :length, : self.head_dim]
        return keys, values


@dataclass(frozen=True)
class Full(LayerKind):
    """Keys and values of all tokens."""

    name = "full"

    @classmethod
    def of(cls, seen: SeenCall, kind: LayerKind) -> LayerKind:
        return cls()

    def spec(self, layer: Layer, paging: Paging) -> KVCacheSpec:
        stored = paging.backend.stored_head_dim(layer.head_dim)
        spec = FullAttentionSpec(layer.kv_heads, layer.head_dim, stored, paging.page_size, paging.dtype)
        return spec if paging.codec is None else paging.codec.coded(spec, paging.scales, paging.codec.dtype)

    def unpaged(self, layer: Layer, tokens: int) -> tuple[int, ...] | None:
        return 2, tokens, layer.kv_heads, layer.head_dim

    def attend(self, rows: Rows, call: AttentionCall, pages: Tensor, scales: PageScales) -> Attended:
        return attend(rows, call, pages, scales)


def attend(
    rows: Rows, call: AttentionCall, pages: Tensor, scales: PageScales, visible: Tensor | None = None
) -> Attended:
    """Write new keys and values into a layer's pages, and attend over them."""
    # ``visible`` ``[B, K, n]`` int32: which of its pages each row reads, -1 for none; None for all. Only with one new
    # token in each row.
    if isinstance(rows, PackedTokens):
        return _attend_by_plan(rows, call, pages, scales)
    if isinstance(rows, UnpagedRows):
        return _attend_outside(rows, call, pages)
    given = (*call.states, pages, rows.starts, rows.lengths, rows.indices, *call.options)
    arguments = DecodeAttention(
        *given, key_scale=scales.key, value_scale=scales.value, saturated=scales.saturated, visible=visible
    )
    if rows.shared is not None:
        return rows.shared.attend(arguments, call.wants_lse)
    return call.by(rows.ops.attend, rows.ops.attend_lse, arguments)


def append(rows: PackedTokens, call: AttentionCall, pages: Tensor, scales: PageScales) -> None:
    """Write new keys and values into a layer's pages."""
    _, key, value = call.states
    places = (rows.token_rows, rows.token_positions, *rows.table)
    ops.append_paged_kv(key, value, pages, *places, rows.plans.backend, *scales)


def _attend_by_plan(rows: PackedTokens, call: AttentionCall, pages: Tensor, scales: PageScales) -> Attended:
    append(rows, call, pages, scales)
    plan = rows.plans.of(call.layer)
    assert plan is not None, "keys and values of packed tokens are attended over by plan"
    arguments = (call.states[0], pages, rows.qo_indptr, *rows.table, *plan, *call.options, scales.key, scales.value)
    return call.by(ops.paged_attention, ops.paged_attention_lse, arguments)


def _attend_outside(rows: UnpagedRows, call: AttentionCall, memory: Tensor) -> Attended:
    """Leave keys and values in a layer's memory ``[2, T, K, D]``, and attend over them."""
    query, key, value = call.states
    memory[0].copy_(key)
    memory[1].copy_(value)
    arguments = RaggedAttention(query, key, value, rows.qo_indptr, call.options[0])
    if rows.ends:
        return attend_on_cpu(arguments, rows.ends, call.wants_lse)
    return call.by(ops.ragged_attention, ops.ragged_attention_lse, arguments)
