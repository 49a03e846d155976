"""Checks which layers' hidden states a user asks for."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from transformers import PreTrainedModel

from compiled_llm.engine.steps.hidden_states import ChosenLayers


def chosen_layers(asked: Sequence[int] | None, model: PreTrainedModel) -> ChosenLayers | None:
    """Return the layers that ``hidden_states`` names; None if it is None.

    Raises:
        ValueError: it is no list of numbers, or one is no layer of the model.
    """
    if asked is None:
        return None
    config = model.config.get_text_config(decoder=True)
    last = config.num_hidden_layers
    all_of_them = f"0 for the embeddings to {last} for the last layer, or from the end, -1 to {-last - 1}"
    if not isinstance(asked, Sequence) or isinstance(asked, str) or not asked:
        raise ValueError(f"hidden_states={asked!r}: give a list of layers, {all_of_them}; None for none")
    for number in asked:
        if not isinstance(number, Integral) or isinstance(number, bool) or not -last - 1 <= number <= last:
            raise ValueError(f"hidden_states={asked!r}: {number!r} is no layer; give {all_of_them}")
    return ChosenLayers({int(number): int(number) % (last + 1) for number in asked}, config.hidden_size, model.dtype)
