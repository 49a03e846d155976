"""The pass that fuses a matmul with the norm before it and the gate after it."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from compiled_llm.compat.torch.tensors import example_of, stands_for_plain
from compiled_llm.compilation.passes.arguments import arguments_of
from compiled_llm_ops.contracts.linear import AddRmsNorm, ChainedLinear, NormedLinear
from compiled_llm_ops.linear import linear
from compiled_llm_ops.linear.chained_linear import has_chained_kernel

NORMED_LINEAR = torch.ops.compiled_llm.normed_linear.default
_CHAINED_LINEAR = torch.ops.compiled_llm.chained_linear.default
_ADD_RMS_NORM = torch.ops.compiled_llm.add_rms_norm.default
_AS_STRIDED = torch.ops.aten.as_strided.default
_LINEAR = nn.functional.linear
_SILU = nn.functional.silu


class NormedProducts:
    """A pass that makes one op of a normed sum, the only matmul that reads it, and the gate after that (SwiGLU)."""

    # With more rows than one, the matmul whose output is added belongs to it, too. It runs after ``NormedSums`` and
    # ``FusedProducts``.

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=_ADD_RMS_NORM):
            results = {user.args[1]: user for user in node.users}
            found = _reader(node, results[0], results[1]) if set(results) == {0, 1} else None
            if found is None:
                continue
            if _is_one_row(node):
                if linear.has_kernel(found.example, rows=1):
                    _replace(graph, found, NORMED_LINEAR, _normed_linear(found))
            else:
                arguments = _chained_linear(found)
                if arguments is not None:
                    _replace(graph, found, _CHAINED_LINEAR, arguments)


class _Reader(NamedTuple):
    """The only matmul that reads a normed sum."""

    sums: fx.Node  # the node of the sum and its norm
    total: fx.Node  # its first result, the sum
    normed: fx.Node  # its second one
    product: fx.Node  # the matmul
    weight: Any  # its weight
    example: Tensor  # of the weight
    bias: list[Any]  # none or one
    gate: fx.Node | None  # ``silu(first) * second`` of its halves, if nothing else reads them


def _is_one_row(sums: fx.Node) -> bool:
    states = example_of(arguments_of(sums, AddRmsNorm).states)
    return bool(states.numel() == states.shape[-1])


def _reader(sums: fx.Node, total: fx.Node, normed: fx.Node) -> _Reader | None:
    """Return the matmul of a normed sum with a plain weight, if no other node reads the norm."""
    product = _only_user(normed)
    if product is None or product.target is not _LINEAR or product.kwargs or product.args[0] is not normed:
        return None
    parameters: list[Any] = [entry for entry in product.args[1:] if entry is not None]
    weight, *bias = parameters
    example = _example_of_weight(weight)
    if example is None or any(user < product for user in total.users):
        return None
    gate = None if bias else _gate(product, len(example))
    return _Reader(sums, total, normed, product, weight, example, bias, gate)


def _normed_linear(found: _Reader) -> NormedLinear:
    args = arguments_of(found.sums, AddRmsNorm)
    gated = found.gate is not None
    return NormedLinear(args.states, args.update, args.weight, args.epsilon, found.weight, gated, overlap=True)


def _chained_linear(found: _Reader) -> ChainedLinear | None:
    """Return the arguments of the op if one summand is a matmul that nothing else reads, with kernels for both."""
    args, gated = arguments_of(found.sums, AddRmsNorm), found.gate is not None
    for first, states in ((args.update, args.states), (args.states, args.update)):
        if first.target is not _LINEAR or first.kwargs or _only_user(first) is not found.sums:
            continue
        rows, weight, *bias = first.args
        example = _example_of_weight(weight)
        if example is None or any(entry is not None for entry in bias):
            continue
        if has_chained_kernel(example, found.example, gated):
            return ChainedLinear(rows, weight, states, args.weight, args.epsilon, found.weight, gated, overlap=True)
    return None


def _replace(graph: fx.Graph, found: _Reader, op: torch._ops.OpOverload, arguments: tuple[Any, ...]) -> None:
    """Put an op, which returns the sum and the product, in the place of what it computes."""
    with graph.inserting_before(found.product):
        both = graph.call_function(op, tuple(arguments))
        new_total, result = (graph.call_function(operator.getitem, (both, number)) for number in range(2))
        new_total.meta.update(found.total.meta)
        if found.bias:
            result = graph.call_function(operator.add, (result, *found.bias))
    end = found.gate or found.product
    result.meta.update(end.meta)
    found.total.replace_all_uses_with(new_total)
    end.replace_all_uses_with(result)
    given = found.sums.all_input_nodes
    for node in (*reversed(_between(found.product, end)), found.normed, found.total, found.sums):
        graph.erase_node(node)
    for node in given:
        if not node.users and node.target is _LINEAR:  # the first matmul, which the op does
            graph.erase_node(node)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _example_of_weight(node: object) -> Tensor | None:
    """Return an example of a weight: of a graph input, or of the stack that begins with one."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "placeholder":
        example: Any = example_of(node)
        return example if stands_for_plain(example) and example.dim() == 2 and example.is_contiguous() else None
    if node.target is not _AS_STRIDED:
        return None
    first, size, stride = cast(tuple[fx.Node, list[int], list[int]], node.args)
    return cast(Tensor, example_of(first).new_empty(size)) if stride == [size[1], 1] else None


def _gate(product: fx.Node, outputs: int) -> fx.Node | None:
    """Return ``silu(first) * second`` of a matmul's halves, if no other node reads them."""
    halves = _halves(product, outputs)
    if halves is None:
        return None
    active, gated = map(_only_user, halves)
    if active is None or gated is None or active.target is not _SILU or _only_user(active) is not gated:
        return None
    return gated if gated.target is operator.mul and set(gated.args) == {active, halves[1]} else None


def _halves(product: fx.Node, outputs: int) -> list[fx.Node] | None:
    """Return the halves of a matmul's output, if no other node reads it: slices of a fused one, or chunks."""
    chunks = _only_user(product)
    if chunks is not None and chunks.target == "chunk" and (chunks.args[1:], chunks.kwargs) == ((2,), {"dim": -1}):
        halves = {user.args[1:]: user for user in chunks.users}
        wanted: list[tuple[Any, ...]] = [(0,), (1,)]
    else:
        halves = {user.args[1:]: user for user in product.users if user.target is torch.narrow}
        wanted = [(-1, 0, outputs // 2), (-1, outputs // 2, outputs // 2)]
    both = len(halves) == 2 == len((chunks or product).users) and set(halves) == set(wanted)
    return [halves[part] for part in wanted] if both else None


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Return all nodes on the way from one to the other, both included, inputs first."""
    path = {first}
    for node in first.graph.nodes:
        if node <= last and not path.isdisjoint(node.all_input_nodes):
            path.add(node)
    return sorted(path)
