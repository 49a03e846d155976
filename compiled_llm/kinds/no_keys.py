"""Layers that keep nothing of any token: they have no attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.kinds.kind import Layer, LayerKind, Paging
from compiled_llm.kinds.spec import UNSCALED, KVCacheSpec, PageScales, TokenPlaces
from compiled_llm_ops import Geometry
from compiled_llm_ops.backends import ChosenBackend


class NoKeysSpec(NamedTuple):
    """Nothing of any token.

    Attributes:
        page_size: S.
        dtype: of the model.
    """

    page_size: int
    dtype: torch.dtype

    @property
    def scales(self) -> PageScales:
        return UNSCALED

    def shape(self, pages: int) -> tuple[int, ...]:
        return pages, 0

    def planned(self, geometry: Geometry) -> None:
        return None

    def write(self, memory: Tensor, places: TokenPlaces, keys: Tensor, values: Tensor) -> None: ...

    def read(self, memory: Tensor, pages: Tensor, length: int) -> tuple[Tensor, Tensor]:
        nothing = memory.new_zeros((0, length, 0))
        return nothing, nothing


@dataclass(frozen=True)
class NoKeys(LayerKind):
    """No attention; the layer may be recurrent."""

    name = "no keys"
    attends = False
    reads_shared_pages = False

    def is_cached_in(self, layer: object) -> bool:
        return True

    def spec(self, layer: Layer, paging: Paging) -> KVCacheSpec:
        return NoKeysSpec(paging.page_size, paging.dtype)

    def has_plan(self, chosen: ChosenBackend) -> bool:
        return False


WITHOUT_ATTENTION = Layer(0, 0, 0, -1, 0.0, NoKeys())
