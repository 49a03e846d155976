"""Learns whether a model hands back a cache that it is given with ``use_cache=False``: some classes do, some do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from compiled_llm.compat.cache_names import cache_in
from compiled_llm.model.traced.shallow_copies import shallow_copy, with_another


def hands_cache_back(
    forward: Callable[..., Any], model: PreTrainedModel, argument: str, path_of_layers: Sequence[str]
) -> bool:
    """Whether the result of ``forward`` has the cache that it is given as ``argument`` with ``use_cache=False``."""
    # It runs on one token and on a copy of the model without its layers, which have no say in that; most classes hand a
    # cache back, so one whose ``forward`` does not run like that is taken for one of them.
    without_layers = with_another(model, path_of_layers, lambda layers: shallow_copy(layers, _modules={}))
    cache, ids = DynamicCache(config=model.config), torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with suppress(Exception), torch.no_grad():
        output = forward(without_layers, input_ids=ids, use_cache=False, return_dict=True, **{argument: cache})
        return cache_in(output) is cache
    return True
