"""Packed layers that multiply one input are one product in programs: side by side in memory, or in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compiled_llm.compat.torch.tensors import example_of, inputs_by_tensor
from compiled_llm.model.packed import one_launch, side_by_side
from compiled_llm.model.packed.stand_in_linear import Member, StandInLinear


def can_be_one(group: Sequence[Member]) -> bool:
    """Whether layers can be one product."""
    return _is_one_launch(group) or side_by_side.can_be_one(group)


def are_one(group: Sequence[Member]) -> bool:
    """Whether layers that can be one product lie as this needs it."""
    return _is_one_launch(group) or side_by_side.are_one(group)


def lay_out(group: Sequence[Member]) -> bool:
    """Lay a group as one product needs it, which nobody may read meanwhile; False if a tensor cannot move."""
    return _is_one_launch(group) or side_by_side.lay_out(group)


def separate(group: Sequence[Member]) -> None:
    """Give each tensor that was moved a storage of its own again."""
    if not _is_one_launch(group):
        side_by_side.separate(group)


def copied_bytes(group: Sequence[Member]) -> int:
    """Return how many bytes of a group's tables are copied while it is one product."""
    return 0 if _is_one_launch(group) else side_by_side.copied_bytes(group)


def _is_one_launch(group: Sequence[Member]) -> bool:
    return one_launch.can_be_one([member.stand_in for member in group])


def fuse(graph: fx.Graph, groups: Sequence[Sequence[StandInLinear]]) -> None:
    """Make one product of those of one input, followed by slices of its output, in a graph as Dynamo made it."""
    # ``groups`` must lie as they were laid out whenever the graph runs.
    input_of, op = inputs_by_tensor(graph), torch.ops.compiled_llm.packed_linear.default
    by_codes: dict[object, dict[object, fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=op):
        by_codes.setdefault(node.args[1], {})[node.args[0]] = node
    for group in groups:
        calls = [by_codes.get(input_of(own.codes), {}) for own in group]
        for rows in [*calls[0]]:
            if all(rows in found for found in calls):
                _fuse(graph, [found[rows] for found in calls], group, input_of)


def _fuse(
    graph: fx.Graph, products: Sequence[fx.Node], group: Sequence[StandInLinear], input_of: Callable[[Tensor], Any]
) -> None:
    first: Any = min(products)
    rows: Any = first.args[0]
    with graph.inserting_before(first):
        bias = _bias(graph, group, input_of, example_of(rows))
        way = one_launch if one_launch.can_be_one(group) else side_by_side
        product = way.product(graph, products, group, bias)
        product.meta.update({key: value for key, value in first.meta.items() if key != "example_value"})
        start = 0
        for node, own in zip(products, group, strict=True):
            part = graph.call_function(torch.narrow, (product, -1, start, own.out_features))
            part.meta.update(node.meta)
            node.replace_all_uses_with(part)
            start += own.out_features
    for node in products:
        graph.erase_node(node)


def _bias(
    graph: fx.Graph, group: Sequence[StandInLinear], input_of: Callable[[Tensor], Any], rows: Tensor
) -> fx.Node | None:
    """Return that of all outputs, of the rows' type; None if there is none."""
    biases = [own.bias for own in group if own.bias is not None]
    if not biases:
        return None
    joined = graph.call_function(torch.cat, ([input_of(bias) for bias in biases],))
    return joined if biases[0].dtype == rows.dtype else graph.call_method("to", (joined, rows.dtype))
