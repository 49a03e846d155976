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

from compiled_llm.compat.huggingface import index_keys, keeps_state
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.huggingface.cache.layer_in_pages import CLASSES, move_out, pages_of
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.kinds.kind import Layer, owners_of_keys, places_beside
from compiled_llm.kinds.registry import holds_states, read_states

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
    theirs = cast("list[Any]", original.layers)
    layers = generate_loop.model_runner.state.facts.layers
    both = zip(owners_of_keys(layers), layers, strict=True)
    keys = [_keys_and_values(theirs[own], shown.shape[1]) if layer.kind.attends else None for own, layer in both]
    keys += [_index_keys(theirs[number], shown.shape[1]) for number in places_beside(layers)]
    generate_loop.fill(new, keys, positions, read_states(original, layers))
    cache.stored = np.concatenate([cache.stored.reshape(len(shown), -1), new], axis=1)


def _keys_and_values(layer: CacheLayerMixin, columns: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values, ``[B, K, C', D]``, of the last of ``columns``."""
    assert layer.keys is not None
    assert layer.values is not None
    return layer.keys[:, :, :columns], layer.values[:, :, :columns]


def _index_keys(layer: object, columns: int) -> tuple[Tensor, Tensor]:
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
        of_its_own = any(like.kind.own_cache_layers or like.states for like in layers)
        return cache.layer_class_to_replicate is DynamicLayer and not of_its_own
    kept = [(number, like) for number, like in enumerate(layers) if like.fills_caches or like.states]
    if kept[-1][0] >= len(cache.layers) or not any(like.fills_caches for _, like in kept):  # nothing counts columns
        return False
    both = [(cast("CacheLayerMixin", cache.layers[number]), like) for number, like in kept]
    filled = {_is_filled(layer, like, state, rows, most) for layer, like in both}
    return len(filled) == 1 and None not in filled


def _is_filled(layer: CacheLayerMixin, like: Layer, state: RunnerState, rows: int, most: int) -> bool | None:
    """Whether a layer of a cache holds what ours keeps of rows, or is empty; None if it cannot be read."""
    if bool(like.states) != keeps_state(layer):
        return None
    found = {holds_states(layer, like, rows)} if like.states else set()
    if like.fills_caches:
        found.add(_holds_keys(layer, like, state, rows, most))
    return found.pop() if len(found) == 1 else None


def _holds_keys(layer: CacheLayerMixin, like: Layer, state: RunnerState, rows: int, most: int) -> bool | None:
    """Whether it holds keys as ours, or is empty; None if it cannot be read."""
    if not (_is_readable(layer, like) and _keeps(layer, like, most)):
        return None
    if layer.keys is None or not layer.keys.numel():
        return False
    return True if _fits(layer.keys, like, state, rows) else None


def _is_readable(layer: CacheLayerMixin, like: Layer) -> bool:
    """Whether a layer of a cache is of a known type, and holds all that ours keeps."""
    if like.states:  # transformers has a type of both for each of these
        return isinstance(layer, _READABLE_LAYERS)
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
    state = model_runner.state
    most = int(cache.get_seq_length()) + new
    if not readable(cache, state.facts.layers, state, rows, most):
        return False
    layers = cast("list[CacheLayerMixin]", cache.layers)
    return all(type(layer) in CLASSES for layer in layers) and not any(map(_needs_gradients, layers))


def _needs_gradients(layer: CacheLayerMixin) -> bool:
    states = (layer.keys, layer.values)
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in states)
