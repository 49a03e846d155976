"""The pass that moves norm and rotary embedding of queries and keys into decode attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from compiled_llm.compat.torch.tensors import example_of
from compiled_llm.compilation.passes.arguments import arguments_of, set_arguments
from compiled_llm.compilation.passes.patterns import RMS_NORM, ROTARY, norms_each_column
from compiled_llm_ops.contracts import DecodeAttention


class PreparedInAttention:
    """Moves norm and rotary embedding of queries and keys into decode attention, which reads them anyway.

    It runs on the graph as Dynamo made it, before any other pass: the examples of its nodes are still true.

    Attributes:
        matches: how many layers matched; None until a graph was searched.
    """

    pattern = "rotary"

    def __init__(self, attentions: Sequence[torch._ops.OpOverload]) -> None:
        """``attentions`` are the decode ops of a backend that can."""
        self.matches: int | None = None
        self._attentions = attentions

    def __call__(self, graph: fx.Graph) -> None:
        attentions = [node for node in graph.nodes if node.target in self._attentions]
        flat: dict[fx.Node, fx.Node] = {}
        self.matches = self.matches or 0
        for node in attentions:
            args = arguments_of(node, DecodeAttention)
            query, key = _raw(args.query), _raw(args.key)
            if query is not None and key is not None and query.goes_with(key):
                _prepare_inside(graph, node, query, key, flat)
                self.matches += 1
        if attentions and _table_is_settled(attentions):
            for node in attentions:
                set_arguments(node, arguments_of(node, DecodeAttention)._replace(overlap=True))


class _Raw(NamedTuple):
    """Queries or keys of one token a row, before they are normed and rotated.

    Attributes:
        states: ``[B, 1, heads, D]``.
        cos: ``[B, 1, D]``.
        sin: likewise.
        norm: ``[D]``, the weight of their norm; None without one.
        epsilon: what the norm adds; 0.0 without one.
        nodes: those that norm and rotate them, inputs first.
    """

    states: fx.Node
    cos: fx.Node
    sin: fx.Node
    norm: fx.Node | None
    epsilon: float
    nodes: list[fx.Node]

    def goes_with(self, other: _Raw) -> bool:
        """Whether both are rotated by the same angles, and normed with the same epsilon if both are normed."""
        both_normed = self.norm is not None and other.norm is not None
        return (self.cos, self.sin) == (other.cos, other.sin) and (self.epsilon == other.epsilon or not both_normed)


def _raw(packed: Any) -> _Raw | None:
    """Return the source of ``[B, heads, D]``, if it is rotated as the op does it, with or without a norm before."""
    match = ROTARY.match(packed)
    if match is None:
        return None
    found, nodes = match
    states, cos, sin = (found[name] for name in ("states", "cos", "sin"))
    example, angles = example_of(states), [example_of(cos), example_of(sin)]
    rows, tokens, _, size = example.shape
    if tokens != 1 or not isinstance(found["half"], int) or size != 2 * found["half"]:
        return None
    if any(angle.shape != (rows, 1, size) or angle.dtype != example.dtype for angle in angles):
        return None
    normed = RMS_NORM.match(states)
    if normed is None or not norms_each_column(normed[0], example):
        return _Raw(states, cos, sin, None, 0.0, nodes)
    return _Raw(normed[0]["states"], cos, sin, normed[0]["weight"], normed[0]["epsilon"], [*normed[1], *nodes])


def _prepare_inside(graph: fx.Graph, attention: fx.Node, query: _Raw, key: _Raw, flat: dict[fx.Node, fx.Node]) -> None:
    """Let an attention norm and rotate its queries and keys; ``flat``, by node, are cosines and sines as ``[B, D]``."""
    for angles in (query.cos, query.sin):
        if angles not in flat:
            with graph.inserting_after(angles):
                flat[angles] = graph.call_method("squeeze", (angles, 1))
    with graph.inserting_before(attention):
        packed = [graph.call_method("squeeze", (raw.states, 1)) for raw in (query, key)]
    arguments = arguments_of(attention, DecodeAttention)._replace(
        query=packed[0],
        key=packed[1],
        query_norm=query.norm,
        key_norm=key.norm,
        epsilon=query.epsilon or key.epsilon,
        cos=flat[query.cos],
        sin=flat[query.sin],
    )
    set_arguments(attention, arguments)
    for node in (*reversed(key.nodes), *reversed(query.nodes)):
        if not node.users:
            graph.erase_node(node)


def _table_is_settled(attentions: Sequence[fx.Node]) -> bool:
    """Whether no node touches a page table before the last attention has read it."""
    tables: set[Any] = set()
    for node in attentions:
        args = arguments_of(node, DecodeAttention)
        tables |= {args.starts, args.lengths, args.indices}
    users = {user for entry in tables for user in entry.users if user < attentions[-1]}
    return all(entry.op == "placeholder" for entry in tables) and users <= set(attentions)
