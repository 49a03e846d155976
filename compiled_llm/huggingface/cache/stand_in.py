"""Pages that stand in for a cache of HuggingFace's: they read it in, and write new tokens back at the end.

So HuggingFace's own forward may compute a prompt, over its own cache, and decode steps run over pages.

Shapes: B rows, C columns, C' of them that a layer still has, K kv heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig, StaticCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from compiled_llm.compat.huggingface import add_index_keys, index_keys, indexed_layers
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.model.layer_probe import Layer, index_places

READABLE = (DynamicCache, StaticCache)
_READABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


class StandIn(PagedCache):
    """A cache in pages in place of one of HuggingFace's.

    Attributes:
        original: HuggingFace's cache; None once it is no longer needed.
        returned: whether the user gets the original.
        prefill: why HuggingFace's own forward runs over the original first; None if it does not, or has done so.
    """

    def __init__(self, generate_loop: GenerateLoop, original: Cache, returned: bool, prefill: Reason | None) -> None:
        super().__init__(generate_loop)
        self.original: Cache | None = original
        self.returned = returned
        self.prefill = prefill

    @deferred()
    def read(self, shown: NDArray[np.bool_], positions: Sequence[int]) -> None:
        """Read the original's columns beyond the known ones.

        Args:
            shown: ``[B, C]`` up to the original's last column, False where the mask hides it.
            positions: the rotary position of each row's next token.

        Raises:
            OutOfPagesError: the pages are not free; nothing has changed.
        """
        assert self.original is not None
        while len(self.generate_loop.rows) < len(shown):
            self.generate_loop.add_row(0)
        new = shown[:, self.seen :]
        layers = cast("list[CacheLayerMixin]", self.original.layers)
        states = [_states(layer, shown.shape[1]) for layer in layers]
        indexed = index_places(self.generate_loop.model_runner.state.facts.layers)
        states += [_index_keys(layers[index], shown.shape[1]) for index in indexed]
        self.generate_loop.fill(new, states, positions)
        self.stored = np.concatenate([self.stored.reshape(len(shown), -1), new], axis=1)

    @deferred()
    def end_prefill(self, shown: NDArray[np.bool_], positions: Sequence[int]) -> None:
        """Read the columns that HuggingFace's own forward has computed; arguments and errors as ``read``."""
        self.read(shown, positions)
        self.prefill = None
        if not self.returned:
            self.original = None

    def handed_over(self, config: PretrainedConfig) -> Cache:
        return self.write_back() if self.returned else super().handed_over(config)

    @deferred()
    def write_back(self) -> Cache:
        """Append to the original the tokens stored since it was read, and give all pages back; return it."""
        original = self.original
        assert original is not None
        known = int(original.get_seq_length())
        for index in range(len(self.layers) if known < self.seen else 0):
            keys, values = self.copied(index)
            original.update(keys[:, :, known:], values[:, :, known:], index)
        for index, keys in self.index_keys() if known < self.seen else ():
            add_index_keys(original, keys[:, known:], index)
        self.close()
        return original


def _states(layer: CacheLayerMixin, columns: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values, ``[B, K, C', D]``, of the last of ``columns``."""
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys[:, :, :columns], layer.values[:, :, :columns]


def _index_keys(layer: Any, columns: int) -> tuple[Tensor, Tensor]:
    """Return the index keys of a layer, as a head, and values of no size."""
    kept = index_keys(layer)
    assert kept is not None
    keys = kept[:, None, :columns]
    return keys, keys[..., :0]


def readable(cache: Cache, layers: Sequence[Layer], state: RunnerState, rows: int, most: int) -> bool:
    """Whether a cache, one of ``READABLE``, can be read into pages, and later tokens be appended to it.

    The call has ``rows`` rows, B, and ``most`` columns at the end.
    """
    if cache.offloading:
        return False
    if not cache.layers:
        return cache.layer_class_to_replicate is DynamicLayer and not any(like.chooses for like in layers)
    if len(cache.layers) != len(layers) or not all(map(_is_readable, cache.layers, layers)):
        return False
    theirs = cast("list[CacheLayerMixin]", cache.layers)
    filled = [layer.keys for layer in theirs if layer.keys is not None and layer.keys.numel()]
    return (
        len(filled) in (0, len(layers))
        and all(_keeps(layer, like, most) for layer, like in zip(theirs, layers, strict=True))
        and all(_fits(keys, like, state, rows) for keys, like in zip(filled, layers, strict=False))
    )


def _is_readable(layer: Any, like: Layer) -> bool:
    """Whether a layer of a cache is of a known type, that of layers with indexers where there are some."""
    if not like.chooses:
        return type(layer) in _READABLE_LAYERS
    if type(layer) not in indexed_layers():
        return False
    if like.index_size is None or layer.keys is None or not layer.keys.numel():
        return True
    kept = index_keys(layer)
    return kept is not None and kept.shape[1] == layer.keys.shape[2]


def _keeps(layer: CacheLayerMixin, like: Layer, most: int) -> bool:
    """Whether a layer of a cache has room for all columns, or drops those that the model's window has left."""
    holds = layer.get_max_length()
    if holds == -1 or holds >= most:
        return True
    return (
        bool(getattr(layer, "is_sliding", False))
        and holds == like.window_left + 1
        and not getattr(layer, "record_past", False)
    )


def _fits(keys: Tensor, like: Layer, state: RunnerState, rows: int) -> bool:
    shape = (rows, like.kv_heads, like.head_dim)
    return (keys.dtype, keys.device) == (state.dtype, state.device) and keys.shape[:2] + keys.shape[3:] == shape
