"""Goes on with a prompt inside or after its images, over keys and values that pages have of its beginning."""

# HuggingFace's forward takes what its encoder has made of images (``mm_encoder_outputs``, from transformers 5.24), so
# that a prompt may go on in the middle of one. Models that count patches by grids see images as they see text, from
# left to right; others may not, and are computed from the beginning. Shapes: T tokens of the prompt, P patches.

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from compiled_llm.compat.images.vision_encoders import ImageModel
from compiled_llm.engine.images.prompt_encoder import flat
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.kvcache.row import Row
from compiled_llm.model.facts import ModelFacts

_OUTPUTS = "mm_encoder_outputs"


def can_resume(facts: ModelFacts) -> bool:
    """Whether a prompt can go on after any of its tokens, if its images are encoded by themselves."""
    takes_outputs = _OUTPUTS in inspect.signature(facts.model_class.forward).parameters
    return takes_outputs and not facts.states and all(layer.keys_of is None for layer in facts.layers)


def begun_cache(state: RunnerState, row: Row) -> DynamicCache:
    """Return a cache of HuggingFace's with the keys and values of a row."""
    cache = DynamicCache()
    for number in range(len(state.facts.layers)):
        keys, values = state.read(number, row)
        cache.update(keys[None], values[None], number)
    return cache


def encoded(
    model: ImageModel,
    inputs: Mapping[str, Tensor],
    patches: Sequence[int],
    runs: Sequence[NDArray[np.int64]],
    start: int,
) -> dict[str, dict[str, Any]]:
    """Return what the encoder makes of the tokens of images from ``start`` on, as the forward takes it.

    Args:
        inputs: ``pixel_values`` ``[P, ...]`` and ``image_grid_thw`` ``[N, 3]`` of all images.
        patches: how many each image has.
        runs: the places of each image's tokens.
    """
    first = next(number for number, run in enumerate(runs) if run[-1] >= start)
    pixels, grid = inputs["pixel_values"][sum(patches[:first]) :], inputs["image_grid_thw"][first:]
    outputs = model.get_image_features(pixels, grid, return_dict=True)
    known = int((runs[first] < start).sum())
    later: dict[str, Any] = {"pooler_output": [flat(outputs["pooler_output"])[known:]]}
    if (deep := outputs.get("deepstack_features")) is not None:  # of each layer
        later["deepstack_features"] = [
            layer[known:] if isinstance(layer, Tensor) else [flat(layer)[known:]] for layer in deep
        ]
    return {_OUTPUTS: {"image": type(outputs)(**later)}}
