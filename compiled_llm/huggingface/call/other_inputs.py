"""Further inputs of vision-language models: those that have no effect, and positions with several axes."""

# Shapes: A axes, B rows, T tokens.

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.features import LATE_INPUTS, Seams, feature, has
from compiled_llm.huggingface.cache.extra_columns import ExtraColumns
from compiled_llm.huggingface.handle import CompiledModel
from compiled_llm.huggingface.inspection.host_copies import HostCopies

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
_SECTIONS = ("mrope_section", "xdrope_section")


def without_what_says_nothing(
    model: PreTrainedModel, inputs: Mapping[str, Any], copies: HostCopies | None = None
) -> dict[str, Any]:
    """Return the inputs without those that have no effect: no images, and token types that mark none."""
    copies = HostCopies() if copies is None else copies
    return {name: value for name, value in inputs.items() if not _says_nothing(model, name, value, copies)}


def _says_nothing(model: PreTrainedModel, name: str, value: object, copies: HostCopies) -> bool:
    if isinstance(value, dict):  # the features of images and videos that ``generate`` has computed
        return all(features is None for features in value.values())
    if name not in _TOKEN_TYPES or not isinstance(value, Tensor) or not sees(model):
        return False
    return not bool(copies.of(value).any())


class ReadColumns(ExtraColumns, Protocol):
    """What a part has read for the rows of a forward."""

    @property
    def positions(self) -> NDArray[np.int64]:
        """``[B, Q]``."""
        ...


class InputsPart(Protocol):
    """A part that reads inputs of a model besides tokens."""

    def steps_obstacle(self, runtime: CompiledModel, inputs: Sequence[str]) -> str | None:
        """Return why steps do not read such ``inputs``, or None."""
        ...

    def encoded(self, model: PreTrainedModel, runtime: CompiledModel, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a call, with what an encoder makes of them in their place, if steps read that."""
        ...

    def columns_of(self, model_runner: ModelRunner, ids: Tensor, inputs: Mapping[str, Any]) -> ReadColumns: ...


_INPUTS = Seams[InputsPart]("huggingface", "columns_of")


def reader_of(inputs: Mapping[str, Any]) -> InputsPart | None:
    """Return the part whose steps may read what inputs have besides tokens; None if they have nothing of it."""
    for path, own in LATE_INPUTS.items():
        if path[0] in inputs and has(own) and _at(inputs, path) is not None:
            return feature(_INPUTS.named(own))
    return None


def _at(inputs: Mapping[str, Any], path: Sequence[str]) -> Any:
    found: Any = inputs
    for name in path:
        found = (found or {}).get(name)
    return found


def sees(model: PreTrainedModel) -> bool:
    """Whether a model takes images or videos, which token types mark."""
    # In transformers 5.17, Qwen3.5 has the modalities of text alone.
    return not {"image", "video"}.isdisjoint(model.input_modalities) or _takes_pixels(type(model).forward)


@functools.lru_cache(maxsize=16)  # of classes that may come and go
def _takes_pixels(forward: Callable[..., Any]) -> bool:
    return "pixel_values" in inspect.signature(forward).parameters


def one_a_token(position_ids: Tensor, config: PretrainedConfig) -> Tensor | None:
    """Return positions ``[B, T]`` or ``[A, B, T]`` as a text model has them; None if axes differ, as in an image."""
    # If there is one more axis than the model rotates by, the first is for masks alone.
    if position_ids.dim() != 3:
        return position_ids if position_ids.dim() == 2 else None
    rotated = position_ids[-_axes(config) :]
    return rotated[0] if bool((rotated == rotated[:1]).all()) else None


def are_whole(position_ids: Tensor) -> bool:
    """Whether positions are whole numbers, as those of rows in pages are."""
    return not position_ids.is_floating_point() or bool((position_ids == position_ids.long()).all())


def _axes(config: PretrainedConfig) -> int:
    """Return how many axes rotary positions have; 0, which takes all axes, if the config does not say."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return next((len(parameters[name]) for name in _SECTIONS if parameters.get(name)), 0)
