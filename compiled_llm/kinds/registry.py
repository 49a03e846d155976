"""All kinds of layers: what `compiled_llm.features` lists of them, beside those that all else needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from compiled_llm.features import Seams, features
from compiled_llm.kinds.full import Full
from compiled_llm.kinds.kind import Codec, ForwardCache, Layer, LayerFunctions, LayerKind, SeenCall, Trial
from compiled_llm.kinds.no_keys import NoKeys
from compiled_llm.kinds.rows import StateRows
from compiled_llm.kinds.spec import StateSpec
from compiled_llm.kinds.uneven import Uneven


class KindsPart(Protocol):
    """A part with kinds of layers."""

    KINDS: Sequence[type[LayerKind]]


class CodecsPart(Protocol):
    """A part with ways in which pages are stored."""

    CODECS: Sequence[tuple[str | None, Codec]]


class StatesPart(Protocol):
    """A part with layers whose rows keep states."""

    STATES: Sequence[StateLayers]


class StateLayers(Protocol):
    """A module of layers whose rows keep states: what the functions below hand on to it."""

    OPS: Sequence[Sequence[torch._ops.OpOverload]]

    def let_layers_pack(self, model: nn.Module) -> None: ...
    def as_they_were(self, model: nn.Module) -> None: ...
    def let_layers_compute_on_fakes(self, model: nn.Module, tokens: int) -> None: ...
    def has_states(self, model: nn.Module) -> bool: ...
    def state_probe(self, tokens: int, device: torch.device) -> NotedStates: ...
    def cache_of(self, layers: Sequence[Layer]) -> Callable[[StateRows, Sequence[Tensor], Any], object]: ...
    def add_states(self, cache: Cache, layers: Sequence[Layer], states: Sequence[Tensor]) -> None: ...
    def read_states(self, cache: Cache, layers: Sequence[Layer]) -> list[Tensor]: ...
    def holds_states(self, layer: object, like: Layer, rows: int) -> bool | None: ...


class NotedStates(Protocol):
    """What stands for HuggingFace's cache in a trial forward, and notes what layers keep."""

    @property
    def specs(self) -> Mapping[int, tuple[StateSpec, ...]]: ...


_KINDS = Seams[KindsPart]("kinds", "KINDS")
_CODECS = Seams[CodecsPart]("kinds", "CODECS")
_STATES = Seams[StatesPart]("kinds", "STATES")

KINDS: Sequence[type[LayerKind]] = (Full, Uneven, *(kind for part in features(_KINDS) for kind in part.KINDS))
"""Each takes the place of what those before it have found, or lies over it."""

CODECS: Mapping[str | None, Codec] = dict(codec for part in features(_CODECS) for codec in part.CODECS)
"""How pages are stored, by ``kv_dtype``."""

STATES: Sequence[StateLayers] = [layers for part in features(_STATES) for layers in part.STATES]
"""Modules of layers whose rows keep states besides pages."""


def kind_of(seen: SeenCall) -> LayerKind:
    """Return the kind of a layer that calls attention; UnsupportedModelError if no kind can serve the call."""
    found: LayerKind = NoKeys()
    for kind in KINDS:
        found = kind.of(seen, found)
    return found


def compared(model: PreTrainedModel, trial: Trial, layers: Sequence[Layer]) -> Sequence[Layer]:
    """Return the layers as HuggingFace's cache shows what they keep; UnsupportedModelError if no kind keeps that."""
    for kind in KINDS:
        layers = kind.compared(model, trial, layers)
    return layers


def check_kinds(model: PreTrainedModel, functions: LayerFunctions) -> None:
    """Raise UnsupportedModelError if this version of transformers, or the options, do not fit a model."""
    for kind in KINDS:
        kind.check(model, functions)


def meanings_of(functions: LayerFunctions) -> dict[str, Any]:
    """Return the meanings of functions by which layers attend: code that was compiled for another is of no use."""
    return {name: meaning for kind in KINDS for name, meaning in kind.meanings(functions).items()}


def trial_inputs(model: PreTrainedModel, tokens: int) -> dict[str, Any]:
    """Return what a trial forward of so many tokens needs besides."""
    return {name: given for kind in KINDS for name, given in kind.trial_inputs(model, tokens).items()}


def forward_cache_for(layers: Sequence[Layer]) -> Callable[[PreTrainedModel, Any], ForwardCache] | None:
    """Return what makes a stand-in for HuggingFace's cache in a forward of a model; None if it needs none."""
    makers = [maker for kind in KINDS if (maker := kind.forward_cache(layers)) is not None]
    return makers[-1] if makers else None


# ---- layers whose rows keep states besides pages


def let_layers_pack(model: nn.Module) -> None:
    """Let such layers compute packed rows by what ``states_cache`` makes; UnsupportedModelError if one cannot."""
    for module in STATES:
        module.let_layers_pack(model)


def as_they_were(model: nn.Module) -> None:
    """Undo ``let_layers_pack``."""
    for module in STATES:
        module.as_they_were(model)


@contextmanager
def packing(model: nn.Module) -> Iterator[None]:
    """Let layers pack rows for the block; errors as ``let_layers_pack``."""
    let_layers_pack(model)
    try:
        yield
    finally:
        as_they_were(model)


def let_layers_compute_on_fakes(model: nn.Module, tokens: int) -> None:
    """Let such layers compute by our ops on fake tensors, a row of so many tokens, whatever cache they are given."""
    for module in STATES:
        module.let_layers_compute_on_fakes(model, tokens)


def state_probe(model: PreTrainedModel, tokens: int) -> Callable[[], NotedStates] | None:
    """Return what makes a cache for a trial forward of so many tokens, which has then ``specs`` of layers by number.

    None if no layer has states.
    """
    modules = [module for module in STATES if module.has_states(model)]
    return functools.partial(modules[0].state_probe, tokens, model.device) if modules else None


def states_cache(layers: Sequence[Layer]) -> Callable[[StateRows, Sequence[Tensor], Any], object] | None:
    """Return what makes a forward's cache, of its rows, the memory of states, and what layers that attend have.

    None if no layer has states.
    """
    return next((module.cache_of(layers) for module in STATES if any(layer.states for layer in layers)), None)


def add_states(cache: Cache, layers: Sequence[Layer], states: Sequence[Tensor]) -> None:
    """Give HuggingFace's dynamic cache states ``[B, ...]`` of layers, as if their own forward had left them there."""
    for module in STATES:
        module.add_states(cache, layers, states)


def read_states(cache: Cache, layers: Sequence[Layer]) -> list[Tensor]:
    """Return the layers' states ``[B, ...]`` that their own forward has left in HuggingFace's cache."""
    modules = [module for module in STATES if any(layer.states for layer in layers)]
    return [states for module in modules for states in module.read_states(cache, layers)]


def holds_states(layer: object, like: Layer, rows: int) -> bool | None:
    """Whether a layer of HuggingFace's cache holds states of ``rows`` as ``like``, or is empty; None if it does not."""
    return next((module.holds_states(layer, like, rows) for module in STATES), None)


def state_ops() -> Sequence[Sequence[torch._ops.OpOverload]]:
    """Return the ops that read and write states: a layer calls one of the first that its model's graph has any of."""
    return [ops for module in STATES for ops in module.OPS]
