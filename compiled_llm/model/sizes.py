"""Sizes of a HuggingFace model that pages, tables and programs follow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from compiled_llm.compat.torch.tensors import is_wrapper
from compiled_llm.kinds.kind import Layer
from compiled_llm.model.classifiers import is_classifier
from compiled_llm.model.version.tensors import tensors_of
from compiled_llm_ops import Geometry


def weights_of_a_layer(model: PreTrainedModel, layers: int) -> int:
    """Return how many weights the matrices of a layer have; experts, of which few are used, are not counted."""
    return sum(count for count, _ in _matrices(model)) // layers


def matrix_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the matrices of all layers, counted as ``weights_of_a_layer`` counts them."""
    return sum(size for _, size in _matrices(model))


def _matrices(model: PreTrainedModel) -> Iterator[tuple[int, int]]:
    """Yield how many weights each matrix has, and how many bytes; both ends of the model are left out."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    seen = {id(parameter) for module in ends if module is not None for parameter in module.parameters()}
    for module in model.modules():
        if module not in ends and (packed := _packed_matrix(module)) is not None:
            yield packed
            continue
        for weight in module._parameters.values():
            if weight is not None and weight.dim() == 2 and id(weight) not in seen:
                seen.add(id(weight))
                yield weight.numel(), weight.nbytes


def _packed_matrix(module: nn.Module) -> tuple[int, int] | None:
    """Return the weights that a layer of another library stands for, and its bytes; None of any other module."""
    sizes = [vars(module).get(name) for name in ("in_features", "out_features")]
    weight = module._parameters.get("weight")
    plain = type(weight) is nn.Parameter and weight.element_size() > 1
    if plain or module._modules or not all(isinstance(size, int) for size in sizes):
        return None
    held = {id(tensor): tensor.nbytes for tensor in tensors_of(module) if not is_wrapper(tensor)}
    return math.prod(cast("list[int]", sizes)), sum(held.values())


def logits_width(model: PreTrainedModel) -> int:
    """Return V, how many logits a token has; of a classifier one for each label."""
    if is_classifier(model):
        return int(model.config.num_labels or 0)
    found = _outputs_of(model.get_output_embeddings())
    return int(model.config.get_text_config(decoder=True).vocab_size) if found is None else found


def _outputs_of(head: object) -> int | None:
    """Return how many outputs a head has, by its last layer's weight or by what that says; None if neither tells."""
    if isinstance(head, nn.Sequential):
        return next((found for layer in reversed(head) if (found := _outputs_of(layer)) is not None), None)
    weight: Any = getattr(head, "weight", None)
    outputs = getattr(head, "out_features", None)
    if type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point():  # others are packed, in any shape
        return int(weight.shape[0])
    return outputs if isinstance(outputs, int) else None


def max_positions_of(model: PreTrainedModel) -> int:
    """Return how many positions the model was made for."""
    return _positions(model.config.get_text_config(decoder=True))


class MaxPositions:
    """What ``max_positions_of`` returns, read in every call; the config that has it is remembered, once it is found."""

    def __init__(self) -> None:
        self._config: PretrainedConfig | None = None
        self._of_text: PretrainedConfig | None = None

    def of(self, model: PreTrainedModel) -> int:
        if model.config is not self._config:
            self._config, self._of_text = model.config, model.config.get_text_config(decoder=True)
        return _positions(self._of_text)


def _positions(config: PretrainedConfig | None) -> int:
    return int(getattr(config, "max_position_embeddings", 2**17))


def attention_geometries(layers: Sequence[Layer], page_size: int, dtype: torch.dtype) -> list[Geometry]:
    """Return the geometry of each layer, with the model's head sizes; layers of one geometry share a plan."""
    return [
        Geometry(
            layer.query_heads,
            layer.kv_heads,
            layer.head_dim,
            page_size,
            layer.window_left,
            layer.logits_soft_cap,
            dtype,
            dtype,
            function=layer.kind.function,
        )
        for layer in layers
    ]
