"""Calls of ``generate`` whose pictures steps read: the engine's encoder, and its prefill with pictures."""

# Shapes: B rows, Q columns, K tokens of pictures of all rows, A axes of positions, F layers with features of their own,
# C hidden size.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.engine.images.encoder.compiled_encoder import own_encoder, slower_encoder
from compiled_llm.engine.images.read_in_steps import model_obstacle
from compiled_llm.engine.images.shown import AXES, ShownTokens, forward_for
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.huggingface.cache.cache_columns import on_host
from compiled_llm.huggingface.call.current_call import copies
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.model.facts import Forward

if TYPE_CHECKING:
    from compiled_llm.huggingface import images as this
    from compiled_llm.huggingface.call.other_inputs import InputsPart

    checked: InputsPart = this

_PIXELS = "pixel_values"
_GRID = "image_grid_thw"
_OUTPUTS = "mm_encoder_outputs"
_READ = frozenset({_PIXELS, _GRID, _OUTPUTS, "mm_token_type_ids"})


def steps_obstacle(runtime: CompiledModel, inputs: Sequence[str]) -> str | None:
    """Return why steps do not read the pictures of a call with such ``inputs`` besides tokens, or None."""
    if not _wanted(runtime):
        return f"the model is given {', '.join(inputs)}"
    if more := sorted({*inputs} - _READ):
        return f"the model is given {', '.join(more)}"
    return model_obstacle(runtime.facts, runtime.config)


def _wanted(runtime: CompiledModel) -> bool:
    """Whether steps are to read pictures where they can."""
    return runtime.config.images_in_steps_on(runtime.facts.model.device.type)


# ---- the encoder


def encoded(model: PreTrainedModel, runtime: CompiledModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a call, those of pictures replaced by what the encoder makes of them, if steps read it."""
    # From transformers 5.24 on, ``generate`` asks for it before it expands rows to beams.
    pixels = inputs.get(_PIXELS)
    grid = inputs.get(_GRID)
    videos = inputs.get("pixel_values_videos") is not None
    if pixels is None or grid is None or videos or inputs.get(_OUTPUTS) or not _may_encode(model, runtime):
        return dict(inputs)
    model_runner = runtime.model_runner()
    if (slower := slower_encoder(model_runner)) is not None:
        runtime.counters.took_part(slower, "its pictures take longer")
    outputs = features_of(model_runner, inputs)
    return {**{name: value for name, value in inputs.items() if name not in (_PIXELS, _GRID)}, _OUTPUTS: outputs}


def _may_encode(model: PreTrainedModel, runtime: CompiledModel) -> bool:
    """Whether steps can read pictures of the model as it is now."""
    if runtime.asleep or runtime.obstacle() is not None or torch.is_autocast_enabled(model.device.type):
        return False
    return _wanted(runtime) and model_obstacle(runtime.facts, runtime.config) is None


def features_of(model_runner: ModelRunner, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what HuggingFace's forward takes in place of pixels ``[P, ...]`` and their grids ``[N, 3]``."""
    pixels = inputs[_PIXELS]
    grid = copies().of(inputs[_GRID])
    return {"image": model_runner.thread.call(_features, model_runner, pixels, grid)}


def _features(model_runner: ModelRunner, pixels: Tensor, grid: Tensor) -> Mapping[str, Any]:
    """Return what the encoder makes of pictures, with their grids on the CPU; called in the model's executor."""
    facts = model_runner.state.facts
    model = facts.model
    own = own_encoder(model, model_runner)
    inner, grid = (model.model, grid.to(model.device)) if own is None else (own.inside(model.model), grid)
    pixels = pixels.to(model.device, non_blocking=True)
    with torch.no_grad(), facts.attention.original():
        # Whether a tensor was made in inference mode would be compiled in.
        given = pixels.clone() if pixels.is_inference() else pixels
        features: Mapping[str, Any] = inner.get_image_features(given, grid, return_dict=True)
        return features


# ---- the prefill


class ShownColumns(NamedTuple):
    """What the rows of a call show in their columns."""

    axes: NDArray[np.int64]  # ``[A, B, Q]``, rotary positions
    numbers: NDArray[np.int64]  # ``[B, Q]``, each token's among those of pictures of all rows; -1 of text
    features: Tensor  # ``[1 + F, K, C]`` in the model's dtype, the last layer's first
    forward: Forward | None  # takes those of further layers; None without them

    @classmethod
    def of_call(cls, model_runner: ModelRunner, ids: Tensor, inputs: Mapping[str, Any]) -> ShownColumns:
        """Return that of a forward's inputs, with ids ``[B, Q]`` on the CPU.

        Raises:
            ValueError: the pictures have other numbers of tokens than ``ids`` have places for them.
        """
        facts = model_runner.state.facts
        model = facts.model
        shown = ids.numpy() == model.config.image_token_id
        outputs = inputs.get(_OUTPUTS) or features_of(model_runner, inputs)
        features = _stacked(outputs["image"], model.dtype)
        if (places := int(shown.sum())) != features.shape[1]:
            raise ValueError(
                f"input_ids: {places} tokens of pictures and features of {features.shape[1]} do not match; give what "
                "the model's own processor returns"
            )
        positions = on_host(inputs["position_ids"]).astype(np.int64)
        axes = np.broadcast_to(positions[-AXES:] if positions.ndim == 3 else positions, (AXES, *shown.shape)).copy()
        numbers = np.where(shown, shown.cumsum().reshape(shown.shape) - 1, -1)
        forward = model_runner.thread.call(forward_for, model_runner, facts) if len(features) > 1 else None
        return cls(axes, numbers, features, forward)

    @property
    def positions(self) -> NDArray[np.int64]:
        """``[B, Q]``, those of the last axis, which all axes of text have."""
        positions: NDArray[np.int64] = self.axes[-1]
        return positions

    def select(self, row: int, columns: NDArray[np.int64]) -> ShownTokens | None:
        """Return what a row shows in some columns; None if that is text alone."""
        numbers = self.numbers[row, columns]
        places = np.flatnonzero(numbers >= 0)
        if not len(places):
            return None
        return ShownTokens(self.axes[:, row, columns], places, self.features, numbers[places], self.forward)


columns_of = ShownColumns.of_call


def _stacked(outputs: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Return the features of all pictures' tokens, ``[1 + F, K, C]``."""
    layers = [outputs["pooler_output"], *(outputs.get("deepstack_features") or ())]
    return torch.stack([_flat(layer) for layer in layers]).to(dtype)


def _flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([own.reshape(-1, own.shape[-1]) for own in parts])
