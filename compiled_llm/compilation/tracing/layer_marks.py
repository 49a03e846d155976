"""Marks around layers: Dynamo traces the nodes between them, or none, and ``fill`` adds the missing ones."""

from __future__ import annotations

import functools
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx

from compiled_llm.compilation.passes.arguments import arguments_of
from compiled_llm_ops.library import define_op, kernel_of


class _LayerBegins(NamedTuple):
    hidden: Tensor
    tensors: list[Tensor]
    layer: int


class _LayerEnds(NamedTuple):
    hidden: Tensor
    layer: int
    like: int


@define_op(_LayerBegins)
def layer_begins(args: _LayerBegins) -> Tensor:
    """Return ``hidden``, before a layer."""
    return torch.empty_like(args.hidden)


@define_op(_LayerEnds)
def layer_ends(args: _LayerEnds) -> Tensor:
    """Return ``hidden``, after a layer."""
    return torch.empty_like(args.hidden)


@kernel_of(layer_begins, "CPU")
@kernel_of(layer_begins, "CUDA")
@kernel_of(layer_ends, "CPU")
@kernel_of(layer_ends, "CUDA")
def _not_filled(_: object) -> Tensor:
    raise RuntimeError("this layer was left out of a graph and not put back")


_begins, _ends = torch.ops.compiled_llm.layer_begins.default, torch.ops.compiled_llm.layer_ends.default


@functools.cache
def marked_class(kind: Any) -> Any:
    """Return a subclass of a layer's class that stands between marks, and does nothing if another layer equals it."""
    # Its instances have ``_tensors``, ``_number``, the number of the layer that they are ``_like``, and ``_beside``:
    # what they return in a tuple with their output, None if they return the output alone.

    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        hidden = _begins(hidden, self._tensors, self._number)
        if self._like == self._number:
            out = kind.forward(self, hidden, *args, **kwargs)
            hidden = out if self._beside is None else out[0]
        ended = _ends(hidden, self._number, self._like)
        return ended if self._beside is None else (ended, *self._beside)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Skip the work of ``nn.Module`` around a forward if there is none: Dynamo would trace that as well."""
        called = kind.__call__ if self._like == self._number or self._forward_hooks else forward
        return called(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__call__": call})


@functools.cache
def listing_class(kind: Any) -> Any:
    """Return a subclass of the class of a list of layers, of which the part that has all of them is the list itself."""
    # HuggingFace goes through ``layers[:config.num_hidden_layers]``, for which Dynamo would trace how a list is made.

    def item(self: Any, index: Any) -> Any:
        if isinstance(index, slice) and index.start is index.step is None and index.stop == len(self._modules):
            return self
        return kind.__getitem__(self, index)

    return type(kind.__name__, (kind,), {"__getitem__": item})


def fill(graph: fx.Graph) -> None:
    """Put each layer between its marks, and take the marks out; a graph without marks stays as it is."""
    begins = {
        arguments_of(node, _LayerBegins).layer: node for node in graph.find_nodes(op="call_function", target=_begins)
    }
    ends = {node: arguments_of(node, _LayerEnds) for node in graph.find_nodes(op="call_function", target=_ends)}
    marks = {args.layer: _Marks(begins[args.layer], end) for end, args in ends.items()}
    for args in ends.values():
        if args.like != args.layer:
            _fill_like(graph, marks[args.layer], marks[args.like])
    for mark in chain.from_iterable(marks.values()):
        mark.replace_all_uses_with(_hidden(mark))
        graph.erase_node(mark)


class _Marks(NamedTuple):
    begin: fx.Node
    end: fx.Node


def _fill_like(graph: fx.Graph, empty: _Marks, filled: _Marks) -> None:
    """Copy the nodes between the marks of one layer between those of another."""
    copies = dict(zip(_inputs(filled), _inputs(empty), strict=True))
    nodes = list(graph.nodes)
    with graph.inserting_before(empty.end):
        for node in nodes[nodes.index(filled.begin) + 1 : nodes.index(filled.end)]:
            copies[node] = graph.node_copy(node, lambda read: copies.get(read, read))
    out = _hidden(filled.end)
    empty.end.replace_input_with(empty.begin, copies.get(out, out))


def _hidden(mark: fx.Node) -> fx.Node:
    return cast(fx.Node, mark.args[0])


def _inputs(marks: _Marks) -> list[fx.Node]:
    """Return the inputs that differ from layer to layer: the hidden states, and the layer's own tensors."""
    return [marks.begin, *cast(list[fx.Node], marks.begin.args[1])]
