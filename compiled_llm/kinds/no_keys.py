"""Layers that keep nothing of any token: they have no attention."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_llm.kinds.kind import Layer, LayerKind, Paging
from compiled_llm.kinds.spec import JoinedSpec, KVCacheSpec
from compiled_llm_ops.backends import ChosenBackend


@dataclass(frozen=True)
class NoKeys(LayerKind):
    """No attention; the layer may have states."""

    name = "no keys"
    attends = False
    reads_shared_pages = False

    def is_cached_in(self, layer: object) -> bool:
        return True

    def spec(self, layer: Layer, paging: Paging) -> KVCacheSpec:
        return JoinedSpec(0, 0, paging.page_size, paging.dtype)

    def has_plan(self, chosen: ChosenBackend) -> bool:
        return False


WITHOUT_ATTENTION = Layer(0, 0, 0, -1, 0.0, NoKeys())
