"""What is learnt of a model once, and handed around as one object."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from compiled_llm.model.attention import PagedBatch
from compiled_llm.model.attention_switch import AttentionSwitch
from compiled_llm.model.fused_weights import FusedGroup
from compiled_llm.model.layer_probe import Layer

Forward = Callable[..., Any]
"""A model class's own ``forward``."""


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model; it keeps no model alive.

    Attributes:
        reference: to the model.
        model_class: its own class; a wrapped model's is ours.
        layers: its attention layers.
        fused_groups: its linear layers that read one input.
        attention: whose attention a thread computes with: ours or the model's own.
    """

    reference: weakref.ref[PreTrainedModel]
    model_class: type[PreTrainedModel]
    layers: tuple[Layer, ...]
    fused_groups: tuple[FusedGroup, ...]
    attention: AttentionSwitch

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        model_class: type[PreTrainedModel],
        layers: Sequence[Layer],
        fused_groups: Sequence[FusedGroup] = (),
    ) -> ModelFacts:
        """Return what is known of ``model``, the rest as for the attributes."""
        return cls(weakref.ref(model), model_class, tuple(layers), tuple(fused_groups), AttentionSwitch(model))

    @property
    def forward(self) -> Forward:
        """What the class defines now as ``forward``, taking pages."""
        return with_windows(self.model_class.forward, self.layers)

    @property
    def model(self) -> PreTrainedModel:
        """The model.

        Raises:
            RuntimeError: it no longer exists.
        """
        model = self.reference()
        if model is None:
            raise RuntimeError("the model of this cache or runner no longer exists")
        return model


def with_windows(forward: Forward, layers: Sequence[Layer]) -> Forward:
    """Return a ``forward`` whose layers have the windows that stand in HuggingFace's masks alone; mostly the same."""
    if not any(layer.window_in_mask for layer in layers):
        return forward
    windows = tuple(layer.window_left for layer in layers)

    def windowed(model: PreTrainedModel, *, paged_batch: PagedBatch, **inputs: Any) -> Any:
        return forward(model, paged_batch=paged_batch._replace(windows=windows), **inputs)

    return windowed
