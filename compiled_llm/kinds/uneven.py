"""Layers whose values have heads of another size than their keys."""

# Shapes as in ``kinds/spec.py``; E head size of the values.

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.kinds.full import Full
from compiled_llm.kinds.kind import Layer, LayerKind, Paging, SeenCall
from compiled_llm.kinds.spec import UNSCALED, KVCacheSpec, PageScales, TokenPlaces, last_columns
from compiled_llm_ops import Geometry
from compiled_llm_ops.backends import ChosenBackend


class UnevenAttentionSpec(NamedTuple):
    """Values of another size than the keys, ``[P, K, S, D + E]``: each key is followed by its value."""

    kv_heads: int  # K
    head_dim: int  # D, of keys
    value_head_dim: int  # E
    page_size: int  # S
    dtype: torch.dtype  # of the model

    @property
    def scales(self) -> PageScales:
        return UNSCALED

    def shape(self, pages: int) -> tuple[int, ...]:
        return pages, self.kv_heads, self.page_size, self.head_dim + self.value_head_dim

    def planned(self, geometry: Geometry) -> Geometry:
        return geometry

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None:
        both = last_columns(torch.cat([keys, values], dim=-1), places.width)
        memory[places.pages, :, places.slots] = both[places.rows, :, places.columns]

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        both = memory.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, :length]
        keys, values = both.split([self.head_dim, self.value_head_dim], dim=-1)
        return keys, values


@dataclass(frozen=True)
class Uneven(Full):
    """As ``Full``, with values of another size."""

    name = "uneven"
    value_size: int  # E

    @classmethod
    def of(cls, seen: SeenCall, kind: LayerKind) -> LayerKind:
        size = seen.value.shape[-1]
        return kind if size == seen.key.shape[-1] else cls(size)

    @property
    def value_head_dim(self) -> int:
        return self.value_size

    def missing_kernel(self, chosen: ChosenBackend, layer: Layer, geometry: Geometry, device: str) -> str | None:
        if "uneven heads" not in chosen.backend.kernels:
            return f"its keys have heads of size {layer.head_dim}, and its values of size {self.value_size}"
        return chosen.backend.missing_kernel(geometry)

    def unpaged(self, layer: Layer, tokens: int) -> None:
        return None

    def spec(self, layer: Layer, paging: Paging) -> KVCacheSpec:
        assert paging.codec is None, "the table of support refuses codecs"
        sizes = layer.kv_heads, layer.head_dim, self.value_size
        return UnevenAttentionSpec(*sizes, paging.page_size, paging.dtype)
