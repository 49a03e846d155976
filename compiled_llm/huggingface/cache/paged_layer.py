"""One layer of a ``PagedCache``, with HuggingFace's interface."""

# Shapes: B rows, C tokens a row has been given, K kv heads, D head dimension.

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NoReturn, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin


class LayerSource(Protocol):
    """The part of a cache that its layers read."""

    @property
    def seen(self) -> int: ...

    def copied(self, layer: int) -> tuple[Tensor, Tensor]: ...


def _refused(method: str) -> Callable[..., NoReturn]:
    """Return a method that raises: the layers of a cache share their rows, and pages stay where the model is."""

    def refuse(self: PagedLayer, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"{method}: the layers of a PagedCache share their rows, so layer {self._index} cannot change alone; call "
            "the method of the cache, or use a DynamicCache"
        )

    return refuse


class PagedLayer(CacheLayerMixin):
    """One layer with HuggingFace's interface; its keys and values lie in the pages."""

    is_sliding = False

    def __init__(
        self, cache: LayerSource, index: int, dtype: torch.dtype, device: torch.device, is_croppable: bool = True
    ) -> None:
        self.is_croppable = is_croppable
        self._cache = weakref.ref(cache)  # a cycle would keep the rows' pages until the garbage collector comes by
        self._index = index
        self.dtype: torch.dtype = dtype
        self.device: torch.device = device

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """``[B, K, C, D]``, a copy of the keys; zeros where a token is masked. None while there are none."""
        return self._copied(0)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """``[B, K, C, D]``, a copy of the values; zeros where a token is masked. None while there are none."""
        return self._copied(1)

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.get_seq_length() > 0

    def _copied(self, part: int) -> Tensor | None:
        cache = self._cache()
        return None if cache is None or not cache.seen else cache.copied(self._index)[part]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: pages exist already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> NoReturn:
        """Raise RuntimeError: keys and values enter the pages inside the compiled forward only."""
        raise RuntimeError(
            "a PagedCache belongs to the wrapped model that made it and is filled by that model's own forward; "
            "pass a DynamicCache to other models"
        )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens a row has been given, masked ones included."""
        cache = self._cache()
        return 0 if cache is None else cache.seen

    def get_max_length(self) -> int:
        return -1  # rows grow as far as pages go

    crop = _refused("crop")
    reset = _refused("reset")
    reorder_cache = _refused("reorder_cache")
    batch_repeat_interleave = _refused("batch_repeat_interleave")
    batch_select_indices = _refused("batch_select_indices")
    offload = _refused("offload")
