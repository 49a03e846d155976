"""Finds of which kinds the layers of a model are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from compiled_llm.kinds import support
from compiled_llm.kinds.support import FoundKind, Support
from compiled_llm.model.layer_probe import Layer
from compiled_llm.model.layers.recurrent import Place, StateSpec


def kinds_of(layers: Sequence[Layer], states: Mapping[Place, StateSpec]) -> Iterator[FoundKind]:
    """Yield the kinds of each layer of a model; ``states`` are those that recurrent layers keep."""
    if states:
        first, _ = min(states)
        yield FoundKind(support.RECURRENT, first, layers[first])
    if not any(layer.attends for layer in layers):
        yield FoundKind(support.NO_ATTENTION, 0, layers[0])
    for number, layer in enumerate(layers):
        yield from (FoundKind(found, number, layer) for found in _of_layer(layer) if layer.attends)


def _of_layer(layer: Layer) -> list[Support]:
    kinds = {
        support.BLOCKS: layer.block_size is not None,
        support.CHOSEN_LATENTS: layer.expansion is not None and layer.chooses,
        support.LATENT: layer.expansion is not None and not layer.chooses,
        support.VARIANT: layer.variant is not None,
        support.UNEVEN: layer.value_head_dim is not None and layer.expansion is None,
        support.WINDOWED: layer.window_left >= 0,
    }
    return [kind for kind, is_one in kinds.items() if is_one] or [support.FULL]
