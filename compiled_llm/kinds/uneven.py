"""Layers whose values have heads of another size than their keys."""

# Shapes as in ``kinds/spec.py``; E head size of the values.

from __future__ import annotations

from dataclasses import dataclass

from compiled_llm.kinds.full import Full
from compiled_llm.kinds.kind import Layer, LayerKind, Paging, SeenCall
from compiled_llm.kinds.spec import JoinedSpec, KVCacheSpec
from compiled_llm_ops import Geometry
from compiled_llm_ops.backends import ChosenBackend


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
        return JoinedSpec(layer.head_dim, self.value_size, paging.page_size, paging.dtype, layer.kv_heads)
