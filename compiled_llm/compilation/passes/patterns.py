"""Formulas as HuggingFace's models write them, to be found in a graph as Dynamo has made it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compiled_llm.compat import example_of

Found = dict[str, Any]
"""What a formula's parameters stand for, by name: nodes, numbers, dtypes."""


def rotary(states: Tensor, cos: Tensor, sin: Tensor, half: int) -> Tensor:
    """Turn the heads of one token a row by its position (rotary embedding).

    Args:
        states: ``[B, 1, H, D]``.
        cos: ``[B, 1, D]``.
        sin: likewise.
        half: half of D.

    Returns:
        ``[B, H, D]``, as ``attention_forward`` packs them.
    """
    heads, cos, sin = states.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1)
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return (heads * cos + turned * sin).transpose(1, 2).squeeze(1)


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Divide by the root mean square, in float32, and multiply with a weight."""
    numbers = states.to(torch.float32)
    variance = numbers.pow(2).mean(-1, keepdim=True)
    return weight * (numbers * torch.rsqrt(variance + epsilon)).to(dtype)


class Formula:
    """A function of tensors that graphs are searched for."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        """Trace the function; each of its parameters stands for anything."""
        (output,) = fx.symbolic_trace(function).graph.find_nodes(op="output")
        self._result: fx.Node = output.args[0]

    def match(self, node: object) -> tuple[Found, list[fx.Node]] | None:
        """Return what its parameters stand for if ``node`` is its result, and its own nodes, inputs first."""
        match = _Match()
        return (match.found, match.own) if match.fits(self._result, node) else None


class _Match:
    """A comparison of a formula with a part of a graph, from the results on."""

    def __init__(self) -> None:
        self.found: Found = {}
        self.own: list[fx.Node] = []
        self._known: dict[fx.Node, object] = {}

    def fits(self, wanted: Any, given: Any) -> bool:
        """Whether what is given is what is wanted: a node, a literal, or either in sequences and slices."""
        if isinstance(wanted, fx.Node):
            if wanted not in self._known:
                self._known[wanted] = given
                return self._node_fits(wanted, given)
            return _same(self._known[wanted], given)
        if isinstance(wanted, slice):
            parts = ("start", "stop", "step")
            return isinstance(given, slice) and all(self.fits(getattr(wanted, x), getattr(given, x)) for x in parts)
        if isinstance(wanted, Mapping):
            return (
                isinstance(given, Mapping)
                and wanted.keys() == given.keys()
                and self.fits(list(wanted.values()), [given[name] for name in wanted])
            )
        if isinstance(wanted, Sequence) and not isinstance(wanted, str):
            return isinstance(given, Sequence) and len(wanted) == len(given) and all(map(self.fits, wanted, given))
        return _same(wanted, given)

    def _node_fits(self, wanted: fx.Node, given: object) -> bool:
        if wanted.op == "placeholder":
            self.found[wanted.name] = given
            return True
        if not isinstance(given, fx.Node) or (wanted.op, wanted.target) != (given.op, given.target):
            return False
        fits = self.fits(wanted.args, given.args) and self.fits(wanted.kwargs, given.kwargs)
        self.own.append(given)
        return fits


def _same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and not isinstance(one, fx.Node) and one == other)


ROTARY, RMS_NORM = Formula(rotary), Formula(rms_norm)


def is_norm_of(norm: Found, states: Tensor) -> bool:
    """Whether a norm multiplies what is like ``states`` with a weight for each column, all in one dtype."""
    weight, epsilon = norm["weight"], norm["epsilon"]
    if not isinstance(weight, fx.Node) or not isinstance(epsilon, (int, float)) or norm["dtype"] != states.dtype:
        return False
    example: Tensor = example_of(weight)
    return example.shape == states.shape[-1:] and example.dtype == states.dtype
