"""Finds of which kinds the layers of a model are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from compiled_llm.kinds import support
from compiled_llm.kinds.kind import Layer
from compiled_llm.kinds.support import FoundKind, Support
from compiled_llm.model.layers.recurrent import Place, StateSpec


def kinds_of(layers: Sequence[Layer], states: Mapping[Place, StateSpec]) -> Iterator[FoundKind]:
    """Yield the kinds of each layer of a model; ``states`` are those that recurrent layers keep."""
    if states:
        first, _ = min(states)
        yield FoundKind(support.RECURRENT, first, layers[first])
    if not any(layer.kind.attends for layer in layers):
        yield FoundKind(support.NO_ATTENTION, 0, layers[0])
    for number, layer in enumerate(layers):
        yield from (FoundKind(found, number, layer) for found in _of_layer(layer) if layer.kind.attends)


def _of_layer(layer: Layer) -> list[Support]:
    names = layer.kind.names
    windowed = [support.WINDOWED] if layer.window_left >= 0 else []
    return [support.BY_NAME[name] for name in support.BY_NAME if name in names] + windowed or [support.FULL]
