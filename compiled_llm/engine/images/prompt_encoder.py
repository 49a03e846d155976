"""The encoder of one prompt's images: HuggingFace's, for those of which a cache has nothing."""

# HuggingFace's forward asks ``get_image_features`` of the module inside it; a shallow copy of that has ours. Shapes: N
# images, P patches.

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from compiled_llm.compat.images.vision_encoders import ImageModel
from compiled_llm.engine.images.encoder.compiled_encoder import CompiledEncoder
from compiled_llm.engine.images.encoder_cache import EncoderCache, Features
from compiled_llm.engine.images.keys import patches_of
from compiled_llm.model.traced.shallow_copies import shallow_copy, with_another

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_UNREAD = frozenset({"last_hidden_state", "hidden_states", "attentions"})
"""Fields of what encoders return that the rest of a model does not read."""


class PromptEncoder:
    """The encoder of one prompt's images.

    Attributes:
        pixels: the inputs of N images.
        tokens: how many each has.
        patches: how many each has; None if they are encoded all together.
    """

    def __init__(
        self, pixels: Mapping[str, Tensor], tokens: Sequence[int], keys: Sequence[Hashable], limit: int
    ) -> None:
        """The images are known to a cache of ``limit`` bytes by N ``keys``, or all of them by one."""
        self.pixels, self.tokens, self._keys, self._limit = pixels, tokens, keys, limit
        self.patches = patches_of(pixels, tokens) if len(pixels) == 2 else None

    def inputs(self, device: torch.device) -> dict[str, Tensor]:
        """Return the inputs of images as the forward gets them; pixels of those with patches come when missed."""
        moved = {
            name: tensor.to(device, non_blocking=True)
            for name, tensor in self.pixels.items()
            if self.patches is None or name != "pixel_values"
        }
        if self.patches is not None:
            pixels = self.pixels["pixel_values"]
            moved["pixel_values"] = torch.zeros((), dtype=pixels.dtype, device=device).expand(pixels.shape)
        return moved

    def encoding(self, model: PreTrainedModel, cache: EncoderCache) -> ImageModel:
        """Return a copy of a model whose encoder this is."""
        path = ("model",) if "model" in model._modules else ()
        return cast(ImageModel, with_another(model, path, lambda inner: self._encoding(inner, cache)))

    def _encoding(self, inner: nn.Module, cache: EncoderCache) -> nn.Module:
        compute = getattr(inner, "get_image_features", None)
        if compute is None:
            return cast(nn.Module, shallow_copy(inner))
        names = inspect.signature(compute)

        def get_image_features(*arguments: object, **options: object) -> ModelOutput:
            given = names.bind(*arguments, **options)
            if self.patches is None:
                return self._of_all(lambda: compute(*arguments, **options), cache)
            return self._of_each(given, compute, cache)

        return cast(nn.Module, shallow_copy(inner, get_image_features=get_image_features))

    def _of_all(self, compute: Callable[[], ModelOutput], cache: EncoderCache) -> ModelOutput:
        generation = cache.generation
        if (found := cache.get(key := tuple(self._keys))) is not None:
            return found.kind(**found.fields)
        made = compute()
        if isinstance(made, Mapping) and made.get("pooler_output") is not None:
            fields = {name: _owned(value) for name, value in made.items() if name not in _UNREAD}
            cache.put(key, Features(type(made), fields), self._limit, generation)
        return made

    def _of_each(
        self, given: inspect.BoundArguments, compute: Callable[..., ModelOutput], cache: EncoderCache
    ) -> ModelOutput:
        """Compute the last images, of which the grid has so many, and only those that are missed."""
        grid = given.arguments["image_grid_thw"]

        def computed(pixels: Mapping[str, Tensor]) -> ModelOutput:
            given.arguments.update(pixels)
            return compute(*given.args, **given.kwargs)

        asked = range(len(self._keys) - len(grid), len(self._keys))
        return _joined(self._found(asked, computed, (grid.device, grid.device), cache))

    def _found(
        self,
        numbers: Sequence[int],
        compute: Callable[[Mapping[str, Tensor]], ModelOutput],
        devices: tuple[torch.device, torch.device],
        cache: EncoderCache,
    ) -> list[Features]:
        """Return the features of images, of which those that are missed are computed together.

        ``devices`` are where pixels and grids are given to ``compute``.
        """
        generation = cache.generation
        asked = [self._keys[number] for number in numbers]
        found = {key: features for key in dict.fromkeys(asked) if (features := cache.get(key)) is not None}
        missed = [key for key in dict.fromkeys(asked) if key not in found]
        if missed:
            pixels = self._pixels_of([self._keys.index(key) for key in missed], *devices)
            for key, features in zip(missed, _apart(compute(pixels)), strict=True):
                found[key] = features
                cache.put(key, features, self._limit, generation)
        return [found[key] for key in asked]

    def features(
        self, model: PreTrainedModel, numbers: Sequence[int], cache: EncoderCache, own: CompiledEncoder | None
    ) -> list[Tensor]:
        """Return ``[1 + F, K, C]`` of each of some images with patches: of the last layer, then of F others.

        They are encoded by ``own``; by HuggingFace's encoder if that is None.
        """
        inner: ImageModel = model.model if own is None else own.inside(model.model)

        def computed(pixels: Mapping[str, Tensor]) -> ModelOutput:
            return inner.get_image_features(**pixels, return_dict=True)

        of_grids = model.device if own is None else torch.device("cpu")
        found = self._found(numbers, computed, (model.device, of_grids), cache)
        return [stacked(each.fields, model.dtype) for each in found]

    def _pixels_of(self, numbers: Sequence[int], device: torch.device, of_grids: torch.device) -> dict[str, Tensor]:
        assert self.patches is not None, "such images are encoded together"
        pixels = self.pixels["pixel_values"].split(self.patches)
        grid = self.pixels["image_grid_thw"]
        return {
            "pixel_values": torch.cat([pixels[number] for number in numbers]).to(device, non_blocking=True),
            "image_grid_thw": torch.stack([grid[number] for number in numbers]).to(of_grids, non_blocking=True),
        }


def in_dtype(pixels: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return inputs of images in a model's dtype, which some encoders ask for, and others convert them to."""
    # So half as many bytes are hashed, kept and moved, too.
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in pixels.items()}


def _apart(made: ModelOutput) -> Iterator[Features]:
    """Yield what an encoder returned, by image, each in the form of all: its output, and that of some layers."""
    pooled: Sequence[Tensor] = made["pooler_output"]
    layers, tokens = made.get("deepstack_features"), [len(own) for own in pooled]
    for number, own in enumerate(pooled):
        fields: dict[str, Any] = {"pooler_output": [_owned(own)]}
        if layers is not None:  # they are lists by image from transformers 5.24 on
            fields["deepstack_features"] = [
                _owned(layer.split(tokens)[number]) if isinstance(layer, Tensor) else [_owned(layer[number])]
                for layer in layers
            ]
        yield Features(type(made), fields)


def stacked(outputs: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Return an encoder's features of all tokens, ``[1 + F, K, C]``, the last layer's first."""
    layers = [outputs["pooler_output"], *(outputs.get("deepstack_features") or ())]
    return torch.stack([flat(layer) for layer in layers]).to(dtype)


def flat(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Return features of tokens, ``[K, C]``, which models give by image, in one tensor or in several."""
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([own.reshape(-1, own.shape[-1]) for own in parts])


def _joined(images: Sequence[Features]) -> ModelOutput:
    """Return what an encoder would return for these images together."""
    joined = {"pooler_output": [own.fields["pooler_output"][0] for own in images]}
    if "deepstack_features" in images[0].fields:
        layers = zip(*(own.fields["deepstack_features"] for own in images), strict=True)
        joined["deepstack_features"] = [
            torch.cat(layer) if isinstance(layer[0], Tensor) else [own[0] for own in layer] for layer in layers
        ]
    return images[0].kind(**joined)


def _owned(value: object) -> object:
    """Return a tensor, or a list of some, without the larger ones that they are views of."""
    if isinstance(value, (list, tuple)):
        return [_owned(own) for own in value]
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        return value.clone()
    return value
