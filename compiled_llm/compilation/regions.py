"""Piecewise compilation: a graph is cut into regions before attentions, and equal regions are compiled once."""

# Dynamo's graph of a model is the same operations again and again. Cut before attentions and recurrences, which
# Inductor does not fuse, all regions but the first and the last are equal but for the weights, so one compiled function
# serves them all. Weights, pages and cosines are its inputs.

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
from compiled_llm.compat.torch.tensors import example_of, running_on, sizes_of, storage_number, wrapped_in

PLANNED: tuple[torch._ops.OpOverload, ...] = (
    torch.ops.compiled_llm.paged_attention.default,
    torch.ops.compiled_llm.paged_attention_lse.default,
)
"""The ops that attend by a plan, of any backend, to keys and values."""

_VIEWS = ("squeeze", "transpose", "view", torch.narrow)
_OTHER_VIEWS = ("unsqueeze", "expand", "permute", "unflatten")
_SPLITS = ("split", "chunk", torch.split, torch.chunk)
_SYMBOL = re.compile(r"\b[su]\d+\b")


class Region(NamedTuple):
    """A part of a graph."""

    graph: fx.Graph  # computes ``outputs`` from ``inputs``
    # nodes of the whole graph that are read here: its own inputs, or computed by an earlier region
    inputs: list[fx.Node]
    outputs: list[fx.Node]  # nodes of the whole graph that are computed here, and read by a later region or returned

    def describe(self, examples: Sequence[Any]) -> str:
        """Return all that decides the region's results for ``examples``; names of nodes make no difference."""
        nodes = {node: _Name(f"%{number}") for number, node in enumerate(self.graph.nodes)}
        lines = [_describe_value(value) for value in examples]
        for node in nodes:
            if node.op != "placeholder":
                target = node.target if isinstance(node.target, str) else f"{node.target} {id(node.target)}"
                lines.append(f"{node.op} {target} {map_arg((node.args, node.kwargs), nodes.__getitem__)}")
        return "\n".join(lines)


class _Name(str):
    """A node's name, shown without quotes, unlike a string that is an argument."""

    __repr__ = str.__str__


def _describe_value(value: object) -> str:
    if not isinstance(value, Tensor):
        return f"{type(value).__name__} {value}"
    layout = f"{tuple(value.shape)} {tuple(value.stride())} {value.storage_offset()}"
    line = f"{type(value).__name__} {value.dtype} {value.device} {layout} {value.requires_grad} {value.is_inference()}"
    wrapped = wrapped_in(value)
    if wrapped is None:
        return line
    tensors, others = wrapped  # as of quantised weights: what is computed depends on all of it
    return f"{line} {others} {[f'{name}: {_describe_value(tensor)}' for name, tensor in tensors.items()]}"


def without_symbols(description: str) -> str:
    """Return all that a compiled region depends on: the names of symbolic sizes do not matter."""
    numbers = {symbol: f"symbol{number}" for number, symbol in enumerate(_symbols(description))}
    return _SYMBOL.sub(lambda found: numbers[found[0]], description)


def _symbols(description: str) -> list[str]:
    return list(dict.fromkeys(_SYMBOL.findall(description)))


def layers_in_equal_regions(layers: Sequence[object], at_least: int) -> int:
    """How many layers a region needs, ``at_least`` or more, so that each has the same kinds of layers in order."""
    # Models with two kinds of layers have them in turns, or one of a kind every so often: a region holds whole turns.
    turns = range(1, len(layers) + 1)
    turn = next((length for length in turns if all(map(operator.eq, layers, layers[length:]))), 1)
    return -(-at_least // turn) * turn


def attentions_in(graph: fx.Graph, ops: Sequence[torch._ops.OpOverload] = PLANNED) -> int:
    """Return how often a graph attends, by one of ``ops``: once a layer."""
    return sum(node.target in ops for node in graph.nodes)


def cut(module: fx.GraphModule, layers: int = 1, ops: Sequence[torch._ops.OpOverload] = PLANNED) -> list[Region]:
    """Cut a graph before each call of ``ops``, or before every ``layers``-th; the regions run one after the other."""
    numbers: dict[fx.Node, int] = {}
    count, attentions = 1, 0
    for node in module.graph.nodes:
        if node.target in ops:
            count += attentions % layers == 0
            attentions += 1
        if node.op not in ("placeholder", "output"):
            numbers[node] = count - 1
    for node in reversed(numbers):
        # Views are made in the region that reads them: one that returns its own tensors only is equal to others. Those
        # that several read stay: the first of these would return a view of its input, and no other one would.
        readers = {numbers.get(user, numbers[node]) for user in node.users}
        if node.target in _VIEWS and len(readers) == 1:
            numbers[node] = min(readers)
    places = _places(numbers)
    parts: list[list[fx.Node]] = [[] for _ in range(count)]
    for node in numbers:
        for number in places[node]:
            parts[number].append(node)
    return [_region(nodes, places) for nodes in parts]


def _places(numbers: dict[fx.Node, int]) -> dict[fx.Node, set[int]]:
    """Return the regions that compute each node: its own, or all that read it if it views what none of these does."""
    # Were such a view made in its own region, this would return a view of its input, as of embeddings that the first
    # two layers read. AOTAutograd makes these beside the compiled code, and no program with such a region can be kept.
    places: dict[fx.Node, set[int]] = {}
    views = _views_of_inputs(numbers)
    for node in reversed(numbers):
        places[node] = set().union(*(places[user] for user in node.users)) if node in views else {numbers[node]}
    return places


def _views_of_inputs(numbers: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Return the views, also of views, of what their own region does not compute; those that are returned are none."""
    found: set[fx.Node] = set()
    for node, own in numbers.items():
        outside = all(numbers.get(read) != own or read in found for read in node.all_input_nodes)
        if outside and _is_view(node) and all(user in numbers for user in node.users):
            found.add(node)
    return found


def _is_view(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return node.target in (*_VIEWS, *_OTHER_VIEWS, *_SPLITS)
    base, index = node.args
    if isinstance(base, fx.Node) and base.target in _SPLITS:
        return True
    parts = index if isinstance(index, tuple) else (index,)
    basic = all(part is None or part is ... or isinstance(part, (int, slice)) for part in parts)
    return basic and isinstance(base, fx.Node) and isinstance(base.meta.get("example_value"), Tensor)


def _region(nodes: Sequence[fx.Node], places: Mapping[fx.Node, set[int]]) -> Region:
    inside = set(nodes)
    inputs = list(dict.fromkeys(read for node in nodes for read in node.all_input_nodes if read not in inside))
    outputs = [node for node in nodes if any(not places.get(user, {-1}) <= places[node] for user in node.users)]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return Region(graph, inputs, outputs)


class Examples:
    """Examples of each region's inputs and outputs: fake tensors and symbolic sizes."""

    def __init__(self, module: fx.GraphModule) -> None:
        """Start from the inputs of Dynamo's whole graph; its examples for other nodes may be from before a pass."""
        self._module = module
        self._values = {node: example_of(node) for node in module.graph.find_nodes(op="placeholder")}
        self._known: dict[str, tuple[list[str], list[Any]]] = {}

    def complete(self, region: Region) -> None:
        """Give a region the sizes that none of its inputs has, as inputs of their own: Inductor has no other source."""
        # Of a page table, ``indptr`` may be ``[B + 1]`` where no other input is ``[B]``.
        pairs = [sizes_of(value) for value in self.of(region)]
        missing = set().union(*(parts for _, parts in pairs)) - set().union(*(alone for alone, _ in pairs))
        first = next(node for node in region.graph.nodes if node.op != "placeholder")
        for node in self._module.graph.find_nodes(op="placeholder"):
            if isinstance(self._values[node], torch.SymInt) and (brings := sizes_of(self._values[node])[0] & missing):
                with region.graph.inserting_before(first):
                    region.graph.placeholder(node.name)
                region.inputs.append(node)
                missing -= brings

    def of(self, region: Region) -> list[Any]:
        """Return examples of a region's inputs; all regions before it have been passed to ``follow``."""
        return [self._values[node] for node in region.inputs]

    def follow(self, region: Region, description: str) -> None:
        """Compute a region's outputs: quickly if an earlier region had the same ``description``."""
        with running_on(self._values.values()):
            outputs = self._as_before(description) or self._run(region, description)
        self._values.update(zip(region.outputs, outputs, strict=True))

    def _as_before(self, description: str) -> list[Any] | None:
        symbols, outputs = self._known.get(without_symbols(description), ([], []))
        renamed = {old for old, new in zip(symbols, _symbols(description), strict=False) if old != new}
        if renamed & set(_symbols(" ".join(map(_describe_value, outputs)))):
            return None
        return _others_like(outputs)

    def _run(self, region: Region, description: str) -> list[Any]:
        inputs = self.of(region)
        outputs = list(fx.Interpreter(fx.GraphModule(self._module, region.graph)).run(*inputs))
        if _can_be_made_again([*inputs, *outputs], len(inputs)):
            self._known[without_symbols(description)] = _symbols(description), outputs
        return outputs


def _can_be_made_again(values: Sequence[Any], count: int) -> bool:
    """Whether values after ``count`` are new tensors, described by layout; parts of a fused matmul share memory."""
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
    """Whether there is one tensor, dense in any order of its dimensions."""
    (tensor, *others) = sharing
    # As text: to compare symbolic sizes would guard them. ``empty_like`` keeps the strides of dense tensors only.
    return (
        not others and tensor.storage_offset() == 0 and str(torch.empty_like(tensor).stride()) == str(tensor.stride())
    )


def _is_known(sharing: Sequence[Tensor]) -> bool:
    """Whether tensors of one dtype share memory of a known size."""
    return len({tensor.dtype for tensor in sharing}) == 1 and isinstance(sharing[0].untyped_storage().nbytes(), int)


def _others_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return freshly allocated tensors with the same layouts, sharing memory in the same way."""
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


def join(regions: Sequence[Region], functions: Sequence[Callable[..., Any]], graph: fx.Graph) -> fx.GraphModule:
    """Return ``graph`` with a call of a function in place of each region; each value is freed after its last use."""
    joined = fx.Graph()
    copies = {node: joined.node_copy(node) for node in graph.find_nodes(op="placeholder")}
    calls = {f"region_{number}": _FunctionModule(function) for number, function in enumerate(functions)}
    for name, region in zip(calls, regions, strict=True):
        found = joined.call_module(name, tuple(copies[node] for node in region.inputs))
        for number, node in enumerate(region.outputs):
            copies[node] = joined.call_function(operator.getitem, (found, number))
    (end,) = graph.find_nodes(op="output")
    joined.node_copy(end, copies.__getitem__)
    return fx.GraphModule(calls, joined)


class _FunctionModule(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function
