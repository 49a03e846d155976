"""Recurrent layers: linear attention and state-space models, whose rows have states of fixed size in place of keys."""

# HuggingFace's layers hand states to its cache, and compute by functions that take padded rows, or one row. Here
# ``RecurrentStates`` is in the cache's place. Layers find no earlier state in it, so they take the way of a prompt, for
# one token, too, and it stands in for the functions that they call there (``forwards.py``): ops that read and write the
# states of packed rows. A layer may keep several, each with a number, of up to two tensors: "conv", the newest inputs
# of a convolution, and "recurrent", the matrix of a recurrence.
# Shapes: B rows, T packed tokens, [b, q] the tokens as the model has them (T = b * q), C channels, W width of a
# convolution, K heads of queries and keys, H heads, D size of a key, V size of a value, P size of a head, N size of a
# state, G groups of heads, E entries.

from __future__ import annotations

import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import Cache

from compiled_llm.kinds.kind import Layer
from compiled_llm.kinds.recurrent.forwards import (
    StatesNotFoundError,
    keeps_states,
    own_class,
    packed_forward,
    with_packed_rows,
)
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kinds.rows import NO_ENTRY, StateRows
from compiled_llm.kinds.spec import StateSpec
from compiled_llm_ops import causal_conv1d, gated_delta_rule, selective_scan

OPS: Sequence[Sequence[torch._ops.OpOverload]] = (
    (torch.ops.compiled_llm.gated_delta_rule.default, torch.ops.compiled_llm.selective_scan.default),
    (torch.ops.compiled_llm.causal_conv1d.default,),  # of layers that have nothing else; most others have it, too
)
"""The ops that read and write states: each layer of a model calls one of the first, or one of the second."""

Place = tuple[tuple[int, int], str]  # of a tensor: its layer, the number of its state there; and which of that's it is


class RecurrentStates:
    """States of ``rows``, in place of HuggingFace's cache; ``attending`` takes what layers that attend hand over."""

    def __init__(self, rows: StateRows, memory: Mapping[Place, Tensor], attending: Any = None) -> None:
        self.rows, self._memory, self._attending = rows, memory, attending
        self._state = -1, 0  # the layer that asked last, and the number of its state

    # ---- what HuggingFace's layers ask a cache

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's new keys and values: its attention function has pages."""
        return (key, value) if self._attending is None else self._attending.update(key, value, layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return how many keys a mask is for, and where they begin: those of the new tokens."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return how many tokens the layer has seen: none, as far as it is to know."""
        return 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: no layer is to compute with a state by itself."""
        self._state = layer_idx, state_idx

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, as ``get_conv_state``."""
        self._state = layer_idx, state_idx

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """Return False, for transformers before ``get_conv_state``."""
        if layer_idx is not None:
            self._state = layer_idx, state_idx
        return False

    def update_conv_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object) -> Tensor:
        """Return the inputs of a convolution as they are; ``causal_conv1d`` follows."""
        self._state = layer_idx, state_idx
        return states

    def update_recurrent_state(self, states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object) -> None:
        """Do nothing: the state has been written."""

    # ---- what stands in for functions of its layers

    def causal_conv1d(
        self,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Return ``[b, C, q]`` of as many, by a weight ``[C, W]``."""
        known = activation in (None, "silu", "swish")
        tokens = states.transpose(1, 2).flatten(0, 1)
        memory = self._conv(weight)
        applied = "silu" if known and activation else "none"
        out = causal_conv1d(
            tokens.to(weight.dtype),
            weight,
            bias,
            memory,
            self.rows.token_rows,
            *self.rows.places,
            activation=applied,
        )
        out = out if known else _activated(out, activation)
        mixed: Tensor = out.to(states.dtype).unflatten(0, (states.shape[0], states.shape[2])).transpose(1, 2)
        return mixed

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Return ``[b, q, H, V]``, of ``[b, q, K, D]`` and decay ``g``, ``[b, q, H]`` or ``[b, q, H, D]``; no state."""
        tokens = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), g.flatten(0, 1), beta.flatten(0, 1)
        memory = self._recurrent(value.shape[2], query.shape[3], value.shape[3], query.device)
        scale = query.shape[3] ** -0.5
        out = gated_delta_rule(*tokens, memory, *self.rows.places, scale, use_qk_l2norm_in_kernel)
        return out.unflatten(0, query.shape[:2]), out.new_empty(0)

    def selective_scan(
        self,
        states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        D: Tensor | None = None,  # noqa: N803
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return ``[b, H, q]`` of as many, by Mamba 1, whose heads have one number; B and C are ``[b, N, q]``."""
        dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
        dt = softplus(dt) if delta_softplus else dt
        tokens, steps, b, c = (each.transpose(1, 2).flatten(0, 1) for each in (states, dt, B, C))
        memory = self._recurrent(A.shape[0], 1, A.shape[1], states.device)
        out = selective_scan(tokens[..., None], steps, A, b[:, None], c[:, None], memory, *self.rows.places)[..., 0]
        out = out.unflatten(0, (states.shape[0], states.shape[2])).transpose(1, 2)
        out = out if D is None else out + states * D[:, None]
        out = out if z is None else out * silu(z)
        return (out, out.new_empty(0)) if return_last_state else out

    def chunk_scan(
        self,
        states: Tensor,
        dt: Tensor,
        A: Tensor,  # noqa: N803
        B: Tensor,  # noqa: N803
        C: Tensor,  # noqa: N803
        chunk_size: int,
        D: Tensor | None = None,  # noqa: N803
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **kwargs: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return ``[b, q, H, P]`` float32 of as many, by Mamba 2; B and C are ``[b, q, G, N]``."""
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        states = states.float()
        tokens, steps, b, c = (each.flatten(0, 1) for each in (states, dt, B, C))
        memory = self._recurrent(states.shape[2], states.shape[3], B.shape[3], states.device)
        out = selective_scan(tokens, steps, A, b, c, memory, *self.rows.places).unflatten(0, states.shape[:2])
        out = out if D is None else out + states * D[:, None]
        return (out, out.new_empty(0)) if return_final_states else out

    def _conv(self, weight: Tensor) -> Tensor:
        """Return ``[E, C, W]`` in the model's dtype."""
        return self._memory[self._state, "conv"]

    def _recurrent(self, heads: int, size: int, width: int, device: torch.device) -> Tensor:
        """Return ``[E, H, D, V]`` or ``[E, H, P, N]`` float32."""
        return self._memory[self._state, "recurrent"]


class StateProbe(RecurrentStates):
    """A probe in their place in a trial forward, which notes what each layer keeps."""

    def __init__(self, rows: StateRows) -> None:
        self.memory: dict[Place, Tensor] = {}  # what a layer has named so far, with an entry for each row
        super().__init__(rows, self.memory)

    @classmethod
    def of_one_row(cls, tokens: int, device: torch.device) -> StateProbe:
        """Make it for a row of so many tokens, on tensors of the kind that is made at the moment."""
        numbers = ([0] * tokens, [0, tokens], [NO_ENTRY], [0])
        return cls(StateRows(*(torch.tensor(own, dtype=torch.int32, device=device) for own in numbers)))

    @property
    def specs(self) -> dict[int, tuple[StateSpec, ...]]:
        """What was noted of each layer that keeps something."""
        found: defaultdict[int, tuple[StateSpec, ...]] = defaultdict(tuple)
        for (layer, number), part in sorted(self.memory):
            states = self.memory[(layer, number), part]
            found[layer] += (StateSpec((number, part), tuple(states.shape[1:]), states.dtype),)
        return dict(found)

    def _conv(self, weight: Tensor) -> Tensor:
        states = weight.new_zeros(len(self.rows.read), *weight.shape)
        return self.memory.setdefault((self._state, "conv"), states)

    def _recurrent(self, heads: int, size: int, width: int, device: torch.device) -> Tensor:
        states = torch.zeros(len(self.rows.read), heads, size, width, dtype=torch.float32, device=device)
        return self.memory.setdefault((self._state, "recurrent"), states)


def state_probe(tokens: int, device: torch.device) -> StateProbe:
    return StateProbe.of_one_row(tokens, device)


def has_states(model: nn.Module) -> bool:
    return any(keeps_states(type(module)) for module in model.modules())


def let_layers_pack(model: nn.Module) -> None:
    """Let recurrent layers compute packed rows by ``RecurrentStates``; UnsupportedModelError if one cannot."""
    layers = [module for module in model.modules() if keeps_states(type(module))]
    try:
        classes = [with_packed_rows(type(module), RecurrentStates) for module in layers]
    except StatesNotFoundError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} has recurrent layers that keep states in a way of their own: {error}"
        ) from None
    for module, packed in zip(layers, classes, strict=True):
        module.__class__ = packed


def let_layers_compute_on_fakes(model: nn.Module, tokens: int) -> None:
    """Let recurrent layers of known kinds compute by our ops on fake tensors, whatever cache a forward gives them."""
    # By themselves they may launch kernels of others (flash-linear-attention's, mamba-ssm's), which know nothing of
    # fake tensors, and would read memory that is not there. Layers get a ``forward`` each, which the caller takes off
    # again. ``tokens`` is how many the forward runs on, all of one row.
    layers = [module for module in model.modules() if keeps_states(type(module))]
    for kind in {type(layer) for layer in layers}:
        with suppress(StatesNotFoundError):  # refused later, by name
            argument, packed = packed_forward(kind)
            for layer in layers:
                if type(layer) is kind:
                    states = StateProbe.of_one_row(tokens, next(layer.parameters()).device)
                    layer.forward = _given(states, argument, functools.partial(packed, layer))


def _given(states: RecurrentStates, argument: str, packed: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's ``forward`` that computes by these states in place of the cache that it is given."""
    signature = inspect.signature(packed)

    def forward(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        bound.arguments[argument] = states
        return packed(*bound.args, **bound.kwargs)

    return forward


def as_they_were(model: nn.Module) -> None:
    """Give recurrent layers their own classes again."""
    for module in model.modules():
        if (own := own_class(type(module))) is not None:
            module.__class__ = own


def cache_of(layers: Sequence[Layer]) -> Callable[[StateRows, Sequence[Tensor], Any], RecurrentStates]:
    """Return what makes a forward's cache, of its rows, the memory of states, and what layers that attend have."""
    places = [*_places(layers)]
    return lambda rows, states, attending: RecurrentStates(rows, dict(zip(places, states, strict=True)), attending)


def _places(layers: Sequence[Layer]) -> Iterator[Place]:
    keys = ((number, *spec.key) for number, layer in enumerate(layers) for spec in layer.states)
    return (((layer, number), part) for layer, number, part in keys)


def add_states(cache: Cache, layers: Sequence[Layer], states: Sequence[Tensor]) -> None:
    """Give HuggingFace's dynamic cache the layers' states ``[B, ...]`` as if their own forward had left them there."""
    given: Any = cache
    for ((layer, number), part), own in zip(_places(layers), states, strict=True):
        if part == "conv":
            given.update_conv_state(own, layer, state_idx=number, conv_kernel_size=own.shape[-1])
        else:
            heads_of_one = own.shape[2] == 1  # Mamba 1, whose states have no dimension for it
            given.update_recurrent_state(own.squeeze(2) if heads_of_one else own, layer, state_idx=number)


def read_states(cache: Cache, layers: Sequence[Layer]) -> list[Tensor]:
    """Return the layers' states ``[B, ...]`` that their own forward has left in HuggingFace's cache."""
    given: Any = cache
    specs = [spec for layer in layers for spec in layer.states]
    found = []
    for ((layer, number), part), spec in zip(_places(layers), specs, strict=True):
        kept = given.layers[layer]
        states: Tensor = (kept.conv_states if part == "conv" else kept.recurrent_states)[number]
        found.append(states.reshape(len(states), *spec.shape))  # Mamba 1 has no dimension for heads of one number
    return found


def holds_states(layer: Any, like: Layer, rows: int) -> bool | None:
    """Whether a layer of HuggingFace's cache holds states of ``rows`` as ``like``, or is empty; None if it does not."""
    given = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    if layer.record_past or any(spec.key[0] >= len(layer.conv_states) for spec in like.states):
        return None
    kept = [(given[part][number], spec) for spec in like.states for number, part in [spec.key]]
    if all(states is None for states, _ in kept):
        return False
    fits = all(own is not None and own.numel() == rows * math.prod(spec.shape) for own, spec in kept)
    return True if fits else None


def _activated(states: Tensor, activation: str | None) -> Tensor:
    """Apply an activation that the op does not have."""
    from transformers.activations import ACT2FN

    activated: Tensor = ACT2FN[activation](states)
    return activated
