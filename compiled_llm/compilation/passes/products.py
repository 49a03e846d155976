"""Passes over matmuls with weights: several at once, or by our kernels."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn

import compiled_llm_ops
from compiled_llm import compat
from compiled_llm.compat.torch.inductor import CustomGraphPass, get_hash_for_files
from compiled_llm.compat.torch.tensors import example_of, inputs_by_tensor
from compiled_llm.compilation.passes.normed_products import NORMED_LINEAR
from compiled_llm.model.weights.fused_weights import FusedWeights, is_one
from compiled_llm_ops.linear import chained_linear, linear

if TYPE_CHECKING:
    from torch.fx.node import Argument


_as_strided = torch.ops.aten.as_strided.default
_linear = nn.functional.linear
_VIEWS = [_as_strided, torch.ops.aten.slice.Tensor, torch.ops.aten.view.default]
_add = torch.ops.aten.add.Tensor
_mm = torch.ops.aten.mm.default
_addmm = torch.ops.aten.addmm.default
_reshape = torch.ops.aten.reshape.default
_permute = torch.ops.aten.permute.default
_skinny_linear = torch.ops.compiled_llm.skinny_linear.default


class OuterProducts:
    """A pass that turns matmuls with an inner size of 1 (rotary embeddings' angles) into multiplications."""

    # A launch of cuBLAS becomes a part of a kernel of Inductor's.

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=operator.matmul):
            column, row = map(example_of, node.args)
            if column.dim() > 1 and row.dim() > 1 and isinstance(column.shape[-1], int) and column.shape[-1] == 1:
                node.target = operator.mul


class FusedProducts:
    """A pass that makes one matmul of those of one input with a group's weights, followed by slices of its output."""

    # It runs on the graph as Dynamo made it, so that readers of the slices are traced with their strides: an op that
    # takes any strides gets them as they are, and nothing is copied.

    def __init__(self, weights: FusedWeights) -> None:
        """``weights`` must be ``laid_out`` whenever the graph runs."""
        self._weights = weights

    def __call__(self, graph: fx.Graph) -> None:
        input_of = inputs_by_tensor(graph)
        calls = [node for node in graph.find_nodes(op="call_function", target=_linear) if not node.kwargs]
        for stacks in map(self._weights.stacks, self._weights.groups):
            if not stacks or not all(map(is_one, stacks)):
                continue
            layers = list(zip(*[[input_of(entry) for entry in stack] for stack in stacks], strict=True))
            for rows in {node.args[0]: None for node in calls if _parameters(node) == layers[0]}:
                products = [node for node in calls if node.args[0] is rows and _parameters(node) in layers]
                if list(map(_parameters, products)) == layers:
                    _fuse(graph, products, stacks)


def _parameters(product: fx.Node) -> tuple[object, ...]:
    return tuple(entry for entry in product.args[1:] if entry is not None)


def _fuse(graph: fx.Graph, products: Sequence[fx.Node], stacks: Sequence[Sequence[Tensor]]) -> None:
    """Replace matmuls of one input, in the order of their weights in memory, by slices of one with ``stacks``."""
    first = products[0]
    rows, *inputs = first.args[: len(stacks) + 1]
    with graph.inserting_before(first):
        product = graph.call_function(_linear, (rows, *map(_whole, [graph] * len(stacks), inputs, stacks)))
        product.meta.update({key: value for key, value in first.meta.items() if key != "example_value"})
        start = 0
        for node, weight in zip(products, stacks[0], strict=True):
            part = graph.call_function(torch.narrow, (product, -1, start, len(weight)))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
            start += len(weight)
    for node in products:
        graph.erase_node(node)


def _whole(graph: fx.Graph, first: Argument, stack: Sequence[Tensor]) -> fx.Node:
    """Return a view of a whole stack, made from its first entry, where it begins."""
    size = [sum(map(len, stack)), *stack[0].shape[1:]]
    return graph.call_function(_as_strided, (first, size, list(stack[0].stride())))


class SkinnyProducts(CustomGraphPass):
    """A pass that turns matmuls into ``skinny_linear``, which chooses by rows, if it has a kernel for the weight."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in [*graph.find_nodes(op="call_function", target=_mm), *_plain_addmms(graph)]:
            *bias, rows, transposed = node.args
            weight = _untransposed(transposed)
            if weight is None:
                continue
            with graph.inserting_before(node):
                product = graph.call_function(_skinny_linear, (rows, weight, True, _is_of_product(rows)))
                product.meta["val"] = node.meta["val"]
                result = graph.call_function(_add, (product, *bias)) if bias else product
            result.meta.update(node.meta)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        """Return the key of this pass in the compile cache: all that decides its work, the processor included."""
        return get_hash_for_files(tuple(map(str, rule_files())), extra=f"{linear.mkl_is_slow()}")


def rule_files() -> list[Path]:
    """Return the files that decide the rewritten graph: the passes, and the rules for which weights have a kernel."""
    passes, private = (Path(str(module)).parent.rglob("*.py") for module in (__file__, compat.__file__))
    tilings = Path(str(compiled_llm_ops.__file__)).parent.rglob("*tiling.py")
    return [
        *sorted(passes),
        *sorted(tilings),
        *(Path(str(rule.__file__)) for rule in (linear, chained_linear)),
        *sorted(private),
    ]


def _is_of_product(rows: object) -> bool:
    """Whether ``rows`` come from ``normed_linear``, which weights cannot delay, unlike attention."""
    while isinstance(rows, fx.Node) and rows.target in (_reshape, *_VIEWS):
        rows = rows.args[0]
    if not isinstance(rows, fx.Node) or rows.target is not operator.getitem:
        return False
    given = rows.args[0]
    return isinstance(given, fx.Node) and given.target is NORMED_LINEAR


def _plain_addmms(graph: fx.Graph) -> list[fx.Node]:
    """Return the matmuls whose bias is added unscaled."""
    return [node for node in graph.find_nodes(op="call_function", target=_addmm) if not node.kwargs]


def _untransposed(node: object) -> fx.Node | None:
    """Return the weight whose transpose the node is, if the op has a kernel for it."""
    if not isinstance(node, fx.Node) or node.target is not _permute or node.args[1] != [1, 0]:
        return None
    weight = node.args[0]
    if not isinstance(weight, fx.Node) or not _is_weight(weight):
        return None
    return weight if linear.has_kernel(weight.meta["val"]) else None


def _is_weight(node: fx.Node) -> bool:
    """Whether the node is a graph input or a view of one, and contiguous."""
    given = node
    while given.target in _VIEWS and isinstance(given.args[0], fx.Node):
        given = given.args[0]
    return given.op == "placeholder" and node.meta["val"].is_contiguous()
