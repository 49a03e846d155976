"""Patterns of code in HuggingFace's models, found in a graph as Dynamo has made it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from compiled_llm.compat.torch.tensors import example_of

Found = dict[str, Any]  # the nodes, numbers and dtypes that a pattern's parameters stand for, by name


class Pattern:
    """A function of tensors that graphs are searched for."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        """Trace the function; each of its parameters matches any value."""
        (output,) = fx.symbolic_trace(function).graph.find_nodes(op="output")
        self._result: fx.Node = output.args[0]

    def match(self, node: object) -> tuple[Found, list[fx.Node]] | None:
        """Return the parameters' values if ``node`` is the function's result, and its nodes, inputs first."""
        match = _Match()
        return (match.found, match.nodes) if match.fits(self._result, node) else None


class _Match:
    """A comparison of a pattern with a part of a graph, from the result backwards."""

    def __init__(self) -> None:
        self.found: Found = {}
        self.nodes: list[fx.Node] = []
        self._known: dict[fx.Node, object] = {}

    def fits(self, wanted: object, actual: object) -> bool:
        """Whether both are the same: a node, a literal, or either in sequences and slices."""
        if isinstance(wanted, fx.Node):
            if wanted not in self._known:
                self._known[wanted] = actual
                return self._node_fits(wanted, actual)
            return _same(self._known[wanted], actual)
        if isinstance(wanted, slice):
            parts = ("start", "stop", "step")
            return isinstance(actual, slice) and all(self.fits(getattr(wanted, x), getattr(actual, x)) for x in parts)
        if isinstance(wanted, Mapping):
            return (
                isinstance(actual, Mapping)
                and wanted.keys() == actual.keys()
                and self.fits(list(wanted.values()), [actual[name] for name in wanted])
            )
        if isinstance(wanted, Sequence) and not isinstance(wanted, str):
            return isinstance(actual, Sequence) and len(wanted) == len(actual) and all(map(self.fits, wanted, actual))
        return _same(wanted, actual)

    def _node_fits(self, wanted: fx.Node, actual: object) -> bool:
        if wanted.op == "placeholder":
            self.found[wanted.name] = actual
            return True
        if not isinstance(actual, fx.Node) or (wanted.op, wanted.target) != (actual.op, actual.target):
            return False
        fits = self.fits(wanted.args, actual.args) and self.fits(wanted.kwargs, actual.kwargs)
        self.nodes.append(actual)
        return fits


def _same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and not isinstance(one, fx.Node) and one == other)


# ---- the patterns


def rotary(states: Tensor, cos: Tensor, sin: Tensor, half: int, packed_over: int) -> Tensor:
    """Rotate heads ``[B, 1, H, D]`` or ``[1, T, H, D]`` by ``cos`` and ``sin`` ``[B, 1, D]`` or ``[1, T, D]``."""
    # The result is ``[B, H, D]`` or ``[T, H, D]``, as ``attention_forward`` packs them; ``half`` is half of D,
    # ``packed_over`` the dimension that has one entry, 1 or 0.
    heads, cos, sin = states.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return (heads * cos + rotated * sin).transpose(1, 2).squeeze(packed_over)


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Divide by the root mean square, in float32, and multiply with a weight."""
    values = states.to(torch.float32)
    variance = values.pow(2).mean(-1, keepdim=True)
    return weight * (values * torch.rsqrt(variance + epsilon)).to(dtype)


ROTARY, RMS_NORM = Pattern(rotary), Pattern(rms_norm)


def is_like_llama(model: nn.Module) -> bool:
    """Whether a model's module names fit the patterns: RMS norms and rotary embeddings."""
    names = {type(module).__name__ for module in model.modules()}
    return all(any(part in name for name in names) for part in ("RMSNorm", "RotaryEmbedding"))


def norms_each_column(norm: Found, states: Tensor) -> bool:
    """Whether a norm of tensors like ``states`` has a weight for each column, all in one dtype."""
    weight, epsilon = norm["weight"], norm["epsilon"]
    if not isinstance(weight, fx.Node) or not isinstance(epsilon, (int, float)) or norm["dtype"] != states.dtype:
        return False
    example: Tensor = example_of(weight)
    return example.shape == states.shape[-1:] and example.dtype == states.dtype
