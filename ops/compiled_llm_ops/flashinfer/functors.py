"""Functors that layers bring along: FlashInfer builds kernels with each, one module for a ``Geometry.function``."""

from __future__ import annotations

from typing import Any, Protocol, cast

from compiled_llm_ops.contracts import Geometry
from compiled_llm_ops.protocol import KERNELS


class Functors(Protocol):
    """What ``KERNELS["flashinfer"]["functions"]`` answers besides launches, for a geometry with a function."""

    def jit_args(self, geometry: Geometry) -> list[Any]:
        """Return ``jit_args`` of ``BatchPrefillWithPagedKVCacheWrapper``."""
        ...

    def has_softmax(self, geometry: Geometry) -> bool:
        """Whether weights are the softmax of logits."""
        ...


def functors() -> Functors:
    return cast(Functors, KERNELS["flashinfer"]["functions"])
