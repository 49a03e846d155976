"""Runs the probes that tell a model's layers: when it is wrapped, and when what they read has changed since."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from transformers import PreTrainedModel

from compiled_llm.kinds.kind import Layer, LayerFunctions
from compiled_llm.kinds.registry import as_they_were, let_layers_pack
from compiled_llm.model.attention import BATCH_ARGUMENT
from compiled_llm.model.attention_switch import paged_attention_in
from compiled_llm.model.layer_probe import probe_layers
from compiled_llm.model.probes.mask_probe import check_patterns
from compiled_llm.model.traced.shallow_copies import shallow_copy
from compiled_llm.model.weights.foreign_weights import changes_in_first_call


def layers_of(
    model: PreTrainedModel,
    functions: LayerFunctions,
    watch: AbstractContextManager[object] | None = None,
) -> list[Layer]:
    """Return the layers of an unwrapped model, or UnsupportedModelError; ``watch`` is entered for the first trial."""
    with paged_attention_in(model), watch or nullcontext():
        layers = probe_layers(model, BATCH_ARGUMENT, not changes_in_first_call(model), functions)
    return check_patterns(model, layers)


@contextmanager
def as_if_unwrapped(model: PreTrainedModel, model_class: type[PreTrainedModel]) -> Iterator[PreTrainedModel]:
    """Yield a model of its own class with the modules of a wrapped one, which are as they were for the block."""
    as_they_were(model)
    try:
        yield shallow_copy(model, model_class)
    finally:
        let_layers_pack(model)
