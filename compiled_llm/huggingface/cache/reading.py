"""Reads caches of HuggingFace's into pages, if they are of a kind that can be read and added to."""

# Shapes: B rows, C columns, C' of them that a layer still has, K kv heads, D head dimension.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache, StaticCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from compiled_llm.compat.huggingface import index_keys
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.huggingface.cache.layer_in_pages import CLASSES, move_out, pages_of
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.kinds.kind import Layer, places_beside

READABLE = (DynamicCache, StaticCache)
_READABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


@deferred()
def read_into(cache: PagedCache, original: Cache, shown: NDArray[np.bool_], positions: Sequence[int]) -> None:
    """Read the columns of a ``readable`` cache of HuggingFace's that ``cache``, of as many rows or empty, lacks.

    Args:
        shown: ``[B, C]`` up to the original's last column, False where the mask hides it.
        positions: the rotary position of each row's next token.

    Raises:
        ValueError: there are more rows than ``max_batch_size``.
        OutOfPagesError: the pages are not free; nothing has changed.
    """
    generate_loop = cache.generate_loop
    while len(generate_loop.rows) < len(shown):
        generate_loop.add_row(0)
    new = shown[:, cache.seen :]
    layers = cast("list[CacheLayerMixin]", original.layers)
    states = [_states(layer, shown.shape[1]) for layer in layers]
    beside = places_beside(generate_loop.model_runner.state.facts.layers)
    states += [_index_keys(layers[index], shown.shape[1]) for index in beside]
    generate_loop.fill(new, states, positions)
    cache.stored = np.concatenate([cache.stored.reshape(len(shown), -1), new], axis=1)


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
    """Whether a cache can be read into pages; ``rows`` are B, and ``most`` the columns at the call's end."""
    move_out(cache)
    if cache.offloading:
        return False
    if not cache.layers:
        return cache.layer_class_to_replicate is DynamicLayer and not any(like.kind.own_cache_layers for like in layers)
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
    """Whether a layer of a cache is of a known type, and holds all that ours keeps."""
    return like.kind.is_whole_in(layer) if like.kind.own_cache_layers else type(layer) in _READABLE_LAYERS


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


def may_be_in_pages(cache: DynamicCache, model_runner: ModelRunner, rows: int, new: int) -> bool:
    """Whether a call of ``rows`` rows, B, and ``new`` tokens can run over pages in place of a cache."""
    if (paged := pages_of(cache)) is not None:
        return len(paged.stored) == rows
    state, most = model_runner.state, int(cache.get_seq_length()) + new
    if not readable(cache, state.facts.layers, state, rows, most):
        return False
    layers = cast("list[CacheLayerMixin]", cache.layers)
    return all(type(layer) in CLASSES for layer in layers) and not any(map(_needs_gradients, layers))


def _needs_gradients(layer: CacheLayerMixin) -> bool:
    states = (layer.keys, layer.values)
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in states)
