"""The pass that fuses a sum with its norm."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from compiled_llm.compat.torch.tensors import example_of
from compiled_llm.compilation.passes.patterns import RMS_NORM, Found, norms_each_column

_ADD_RMS_NORM = torch.ops.compiled_llm.add_rms_norm.default


class NormedSums:
    """A pass that makes one op of a sum and its norm, which stand between the matmuls of a layer."""

    pattern = "norm"

    def __init__(self) -> None:
        self.matches: int | None = None  # how many there were; None until a graph was searched

    def __call__(self, graph: fx.Graph) -> None:
        self.matches = self.matches or 0
        for node in graph.find_nodes(op="call_function", target=operator.mul):
            match = RMS_NORM.match(node)
            if match is not None:
                self.matches += _norm_sum(graph, node, *match)


def _norm_sum(graph: fx.Graph, normed: fx.Node, found: Found, nodes: Sequence[fx.Node]) -> bool:
    """Replace a norm and the sum that it norms; False if that is not of two tensors of one shape and dtype."""
    total = found["states"]
    if total.target is not operator.add or not all(isinstance(entry, fx.Node) for entry in total.args):
        return False
    example = example_of(total)
    summands = map(example_of, total.args)
    if not norms_each_column(found, example):
        return False
    if any((summand.shape, summand.dtype) != (example.shape, example.dtype) for summand in summands):
        return False
    with graph.inserting_before(total):
        both = graph.call_function(_ADD_RMS_NORM, (*total.args, found["weight"], found["epsilon"], True))
        for number, node in enumerate((total, normed)):
            result = graph.call_function(operator.getitem, (both, number))
            result.meta.update(node.meta)
            node.replace_all_uses_with(result)
    for node in (*reversed(nodes), total):
        if not node.users:
            graph.erase_node(node)
    return True
