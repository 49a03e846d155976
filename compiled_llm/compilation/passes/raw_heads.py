"""Queries and keys as they come from their projections, found in front of the op that writes or reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from compiled_llm.compat.torch.tensors import example_of
from compiled_llm.compilation.passes.patterns import RMS_NORM, ROTARY, norms_each_column

EACH_ROW, ALL_ROWS = 1, 0
"""The dimension of one entry in ``[B, 1, heads, D]``, one token of each row, and in ``[1, T, heads, D]``, packed."""


class RawHeads(NamedTuple):
    """Queries or keys before they are normed and rotated."""

    states: fx.Node  # ``[B, 1, heads, D]`` or ``[1, T, heads, D]``
    cos: fx.Node  # ``[B, 1, D]`` or ``[1, T, D]``
    sin: fx.Node  # likewise
    norm: fx.Node | None  # ``[D]``, the weight of their norm; None without one
    epsilon: float  # what the norm adds; 0.0 without one
    nodes: list[fx.Node]  # those that norm and rotate them, inputs first

    def goes_with(self, other: RawHeads) -> bool:
        """Whether both are rotated by the same angles, and normed with the same epsilon if both are normed."""
        both_normed = self.norm is not None and other.norm is not None
        return (self.cos, self.sin) == (other.cos, other.sin) and (self.epsilon == other.epsilon or not both_normed)


def raw_heads(packed: object, packed_over: int) -> RawHeads | None:
    """Return the source of ``[T, heads, D]``, if it is rotated as our ops do it, with or without a norm before."""
    match = ROTARY.match(packed)
    if match is None:
        return None
    found, nodes = match
    states, cos, sin = (found[name] for name in ("states", "cos", "sin"))
    example, angles = example_of(states), [example_of(cos), example_of(sin)]
    size = example.shape[3]
    if example.shape[packed_over] != 1 or not isinstance(found["half"], int) or size != 2 * found["half"]:
        return None
    # As text: to compare symbolic sizes would guard them.
    expected = str((*example.shape[:2], size))
    if any(str(tuple(angle.shape)) != expected or angle.dtype != example.dtype for angle in angles):
        return None
    normed = RMS_NORM.match(states)
    if normed is None or not norms_each_column(normed[0], example):
        return RawHeads(states, cos, sin, None, 0.0, nodes)
    return RawHeads(normed[0]["states"], cos, sin, normed[0]["weight"], normed[0]["epsilon"], [*normed[1], *nodes])


class FlatAngles:
    """Cosines and sines as ``[T, D]``, made once for all layers."""

    def __init__(self, graph: fx.Graph, packed_over: int) -> None:
        self._graph, self._packed_over = graph, packed_over
        self._flat: dict[fx.Node, fx.Node] = {}

    def of(self, angles: fx.Node) -> fx.Node:
        if angles not in self._flat:
            with self._graph.inserting_after(angles):
                self._flat[angles] = self._graph.call_method("squeeze", (angles, self._packed_over))
        return self._flat[angles]


def erase_unread(graph: fx.Graph, heads: Sequence[RawHeads]) -> None:
    """Erase what has normed and rotated queries and keys, where nothing else reads it."""
    for each in heads:
        for node in reversed(each.nodes):
            if not node.users:
                graph.erase_node(node)


def table_is_settled(tables: set[Any], readers: Sequence[fx.Node], last: fx.Node) -> bool:
    """Whether no node but ``readers`` touches a page table up to ``last``, the last of those that read it early."""
    users = {user for entry in tables for user in entry.users if user < last}
    return all(entry.op == "placeholder" for entry in tables) and users <= set(readers)
