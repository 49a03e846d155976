"""A graph in pieces: what lies between two attentions is the same in all layers, but for the weights.

Dynamo's graph of a model is the same operations over and over. Cut in front of each attention, which Inductor fuses
with nothing, all pieces but the first and the last are alike, so that one compiled function serves them all. What they
read beyond that (weights, pages, cosines) comes in as inputs.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

import compiled_llm_ops  # defines the ops  # noqa: F401
from compiled_llm.compat import example_of, running_on, storage_number

_ATTENTIONS = (
    torch.ops.compiled_llm.paged_attention.default,
    torch.ops.compiled_llm.paged_attention_lse.default,
    torch.ops.compiled_llm.decode_attention.default,
    torch.ops.compiled_llm.decode_attention_lse.default,
)
_VIEWS = ("squeeze", "transpose", "view", torch.narrow)
_SYMBOL = re.compile(r"\b[su]\d+\b")


class Piece(NamedTuple):
    """A part of a graph.

    Attributes:
        graph: computes ``gives`` from ``takes``.
        takes: nodes of the whole graph that are read here, and given to it or computed by an earlier piece.
        gives: nodes of the whole graph that are computed here, and read by a later piece or given back.
    """

    graph: fx.Graph
    takes: list[fx.Node]
    gives: list[fx.Node]

    def describe(self, examples: Sequence[Any]) -> str:
        """Return all that decides what the piece gives for ``examples``; names of nodes make no difference.

        Args:
            examples: of what it takes, fake tensors and symbolic sizes.
        """
        nodes = {node: _Name(f"%{number}") for number, node in enumerate(self.graph.nodes)}
        lines = [_describe_value(value) for value in examples]
        for node in nodes:
            if node.op != "placeholder":
                target = node.target if isinstance(node.target, str) else f"{node.target} {id(node.target)}"
                lines.append(f"{node.op} {target} {map_arg((node.args, node.kwargs), nodes.__getitem__)}")
        return "\n".join(lines)


class _Name(str):
    """Shown without quotes, unlike a string that is an argument."""

    __repr__ = str.__str__


def _describe_value(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value}"
    layout = f"{tuple(value.shape)} {tuple(value.stride())} {value.storage_offset()}"
    return f"{type(value).__name__} {value.dtype} {value.device} {layout} {value.requires_grad} {value.is_inference()}"


def without_symbols(description: str) -> str:
    """Return all that a compiled piece depends on: names of symbolic sizes make no difference to it."""
    numbers = {symbol: f"symbol{number}" for number, symbol in enumerate(_symbols(description))}
    return _SYMBOL.sub(lambda found: numbers[found[0]], description)


def _symbols(description: str) -> list[str]:
    return list(dict.fromkeys(_SYMBOL.findall(description)))


def cut(module: fx.GraphModule) -> list[Piece]:
    """Cut a graph in front of each attention; the pieces run one after the other."""
    numbers: dict[fx.Node, int] = {}
    count = 1
    for node in module.graph.nodes:
        count += node.target in _ATTENTIONS
        if node.op not in ("placeholder", "output"):
            numbers[node] = count - 1
    for node in reversed(numbers):
        # Views are made where they are read: a piece that gives tensors of its own only is like others of its kind.
        if node.target in _VIEWS and node.users:
            numbers[node] = min(numbers.get(user, numbers[node]) for user in node.users)
    parts: list[list[fx.Node]] = [[] for _ in range(count)]
    for node, number in numbers.items():
        parts[number].append(node)
    return [_piece(nodes, numbers) for nodes in parts]


def _piece(nodes: Sequence[fx.Node], numbers: Mapping[fx.Node, int]) -> Piece:
    own = set(nodes)
    takes = list(dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read not in own))
    gives = [node for node in nodes if any(numbers.get(user) != numbers[node] for user in node.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in takes:
        copies[node] = graph.placeholder(node.name)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in gives))
    return Piece(graph, takes, gives)


class Examples:
    """What each piece takes and gives, as fake tensors and symbolic sizes."""

    def __init__(self, module: fx.GraphModule) -> None:
        """Take the whole graph as Dynamo has made it.

        What it notes of nodes that are not inputs may have been true before a pass, and is not read.
        """
        self._module = module
        self._values = {node: example_of(node) for node in module.graph.find_nodes(op="placeholder")}
        self._known: dict[str, tuple[list[str], list[Any]]] = {}

    def of(self, piece: Piece) -> list[Any]:
        """Return what a piece takes; all pieces before it have been passed to ``follow``."""
        return [self._values[node] for node in piece.takes]

    def follow(self, piece: Piece, description: str) -> None:
        """Find out what a piece gives: the same as an earlier one of its ``description``, which takes less time."""
        with running_on(self._values.values()):
            gives = self._as_before(description) or self._run(piece, description)
        self._values.update(zip(piece.gives, gives, strict=True))

    def _as_before(self, description: str) -> list[Any] | None:
        symbols, gives = self._known.get(without_symbols(description), ([], []))
        renamed = {old for old, new in zip(symbols, _symbols(description), strict=False) if old != new}
        if renamed & set(_symbols(" ".join(map(_describe_value, gives)))):
            return None
        return _others_like(gives)

    def _run(self, piece: Piece, description: str) -> list[Any]:
        takes = self.of(piece)
        gives = list(fx.Interpreter(fx.GraphModule(self._module, piece.graph)).run(*takes))
        if _all_new([*takes, *gives], len(takes)):
            self._known[without_symbols(description)] = _symbols(description), gives
        return gives


def _all_new(values: Sequence[Any], count: int) -> bool:
    """Return whether all ``values`` but the first ``count`` are tensors in new memory, whose likes can be made.

    Parts of one product share theirs.
    """
    made = values[count:]
    if not all(isinstance(value, Tensor) for value in made):
        return False
    others = {storage_number(value) for value in values[:count] if isinstance(value, Tensor)}
    return all(
        others.isdisjoint(map(storage_number, sharing)) and (_is_whole(sharing) or _is_known(sharing))
        for sharing in _by_memory(made)
    )


def _by_memory(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    sharing: dict[int, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        sharing[storage_number(tensor)].append(tensor)
    return list(sharing.values())


def _is_whole(sharing: Sequence[Tensor]) -> bool:
    """Whether there is one tensor, whose numbers lie one next to the other in whatever order."""
    (tensor, *others) = sharing
    # As text: to compare symbolic sizes would guard them. What is not dense has no like with its strides.
    return (
        not others and tensor.storage_offset() == 0 and str(torch.empty_like(tensor).stride()) == str(tensor.stride())
    )


def _is_known(sharing: Sequence[Tensor]) -> bool:
    """Whether tensors of one type lie in memory of a known size."""
    return len({tensor.dtype for tensor in sharing}) == 1 and isinstance(sharing[0].untyped_storage().nbytes(), int)


def _others_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in new memory, laid out and shared in the same way."""
    others: dict[int, Tensor] = {}
    for sharing in _by_memory(tensors):
        if _is_whole(sharing):
            (tensor,) = sharing
            others[id(tensor)] = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            continue
        first = sharing[0]
        elements = first.untyped_storage().nbytes() // first.element_size()
        memory = torch.empty(elements, dtype=first.dtype, device=first.device)
        for tensor in sharing:
            others[id(tensor)] = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return [others[id(tensor)] for tensor in tensors]


def join(pieces: Sequence[Piece], functions: Sequence[Callable[..., Any]], graph: fx.Graph) -> fx.GraphModule:
    """Return ``graph`` with a call of a function in place of each piece; what none reads any more is freed at once."""
    joined = fx.Graph()
    copies = {node: joined.node_copy(node) for node in graph.find_nodes(op="placeholder")}
    calls = {f"piece_{number}": _Call(function) for number, function in enumerate(functions)}
    for name, piece in zip(calls, pieces, strict=True):
        found = joined.call_module(name, tuple(copies[node] for node in piece.takes))
        for number, node in enumerate(piece.gives):
            copies[node] = joined.call_function(operator.getitem, (found, number))
    (end,) = graph.find_nodes(op="output")
    joined.node_copy(end, copies.__getitem__)
    return fx.GraphModule(calls, joined)


class _Call(nn.Module):
    """A function where a graph wants a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
