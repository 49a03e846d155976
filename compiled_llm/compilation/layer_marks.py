"""Marks around layers: Dynamo traces what stands between them once, and ``fill`` puts it where it is missing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from compiled_llm.compat import add_input, copy_input
from compiled_llm.compilation.passes.arguments import arguments_of
from compiled_llm_ops.library import define

TensorsOf = Callable[[int], Sequence[Tensor]]
"""Returns a layer's own tensors, by its number."""


class _LayerBegins(NamedTuple):
    hidden: Tensor
    tensors: list[Tensor]
    layer: int


class _LayerEnds(NamedTuple):
    hidden: Tensor
    layer: int


class _LayerLike(NamedTuple):
    hidden: Tensor
    layer: int
    like: int


def _not_filled(_: object) -> Tensor:
    raise RuntimeError("this layer was left out of a graph and not put back")


def _mark(name: str, arguments: Any) -> torch._ops.OpOverload:
    return define(name, arguments, fake=lambda args: torch.empty_like(args.hidden), cpu=_not_filled, cuda=_not_filled)


_begins = _mark("layer_begins", _LayerBegins)
_ends = _mark("layer_ends", _LayerEnds)
_like = _mark("layer_like", _LayerLike)


@functools.cache
def marked_class(kind: Any) -> Any:
    """Return a subclass of a layer's class that stands between marks, or is a mark itself if another layer equals it.

    Its instances have a ``_number``, the number of the layer that they are ``_like``, and, if that is their own,
    ``_tensors``. Dynamo never sees the tensors of the others: it would take a millisecond for each of them.
    """

    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._like != self._number:
            return like(self, hidden)
        hidden = _begins(hidden, self._tensors, self._number)
        hidden = kind.forward(self, hidden, *args, **kwargs)
        ended: Tensor = _ends(hidden, self._number)
        return ended

    def like(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        marked: Tensor = _like(hidden, self._number, self._like)
        return marked

    def call(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Without what ``nn.Module`` does around a forward if there is none: Dynamo would trace that as well."""
        called = kind.__call__ if self._like == self._number else like
        out: Tensor = called(self, *args, **kwargs)
        return out

    return type(kind.__name__, (kind,), {"forward": forward, "__call__": call})


def fill(module: fx.GraphModule, tensors_of: TensorsOf) -> list[int]:
    """Give a module a graph with all layers in it and without marks; one without marks stays as it is.

    Dynamo keeps its own graph, by whose inputs it calls what is compiled.

    Args:
        module: as Dynamo has made it.
        tensors_of: for layers that are like others.

    Returns:
        The numbers of layers whose tensors the graph takes after Dynamo's inputs, in this order.
    """
    marked = module.graph
    layers = _traced_layers(marked)
    if not layers:
        return []
    likes = {node: arguments_of(node, _LayerLike) for node in marked.find_nodes(op="call_function", target=_like)}
    whole = fx.Graph()
    copies = {node: copy_input(whole, node) for node in marked.find_nodes(op="placeholder")}
    inputs = {
        node: [
            add_input(whole, tensor, of_first)
            for of_first, tensor in zip(layers[args.like].tensors, tensors_of(args.layer), strict=True)
        ]
        for node, args in likes.items()
    }
    for node in marked.nodes:
        if node.op == "placeholder":
            continue
        if node in likes:
            hidden = copies[cast(fx.Node, likes[node].hidden)]
            copies[node] = layers[likes[node].like].copied(whole, copies, hidden, inputs[node])
        elif node.target in (_begins, _ends):
            copies[node] = copies[node.args[0]]
        else:
            copies[node] = whole.node_copy(node, copies.__getitem__)
    module.graph = whole
    return [args.layer for args in likes.values()]


class _Layer(NamedTuple):
    """A layer that was traced: what stands between its marks.

    Attributes:
        begin: the first mark.
        tensors: its own.
        nodes: what it does.
        out: what it returns.
    """

    begin: fx.Node
    tensors: list[fx.Node]
    nodes: list[fx.Node]
    out: fx.Node

    def copied(
        self, graph: fx.Graph, copies: dict[fx.Node, fx.Node], hidden: fx.Node, tensors: Sequence[fx.Node]
    ) -> fx.Node:
        """Do the same once more at the end of a graph, to other hidden states with other tensors; return the result.

        Args:
            graph: where.
            copies: what stands there for each node of the layer's own graph.
            hidden: what the other layer is given.
            tensors: its own.
        """
        inner = {self.begin: hidden, **dict(zip(self.tensors, tensors, strict=True))}
        for node in self.nodes:
            inner[node] = graph.node_copy(node, lambda read: inner[read] if read in inner else copies[read])
        return inner[self.out]


def _traced_layers(graph: fx.Graph) -> dict[int, _Layer]:
    """Return the layers between marks, by number."""
    nodes = list(graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}
    ends = {arguments_of(node, _LayerEnds).layer: node for node in graph.find_nodes(op="call_function", target=_ends)}
    layers = {}
    for begin in graph.find_nodes(op="call_function", target=_begins):
        args = arguments_of(begin, _LayerBegins)
        end = ends[args.layer]
        between = nodes[places[begin] + 1 : places[end]]
        tensors = cast(list[fx.Node], list(args.tensors))
        layers[args.layer] = _Layer(begin, tensors, between, cast(fx.Node, end.args[0]))
    return layers
