"""Passes over the compiled graphs: what makes every family faster without touching its model."""

from __future__ import annotations

import torch
from torch import fx

import compiled_llm_ops  # noqa: F401  (defines the ops)
from compiled_llm.compat import CustomGraphPass, get_hash_for_files
from compiled_llm_ops import linear, tiling

_VIEWS = [torch.ops.aten.as_strided.default, torch.ops.aten.slice.Tensor, torch.ops.aten.view.default]
_add = torch.ops.aten.add.Tensor
_mm = torch.ops.aten.mm.default
_addmm = torch.ops.aten.addmm.default
_permute = torch.ops.aten.permute.default
_skinny_linear = torch.ops.compiled_llm.skinny_linear.default


class SkinnyProducts(CustomGraphPass):
    """Turns products with a weight into ``skinny_linear`` where that has a kernel of its own for the weight.

    The op chooses by the rows that it sees at run time.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place."""
        for node in [*graph.find_nodes(op="call_function", target=_mm), *_plain_addmms(graph)]:
            *bias, rows, transposed = node.args
            weight = _untransposed(transposed)
            if weight is None:
                continue
            with graph.inserting_before(node):
                product = graph.call_function(_skinny_linear, (rows, weight))
                product.meta["val"] = node.meta["val"]
                result = graph.call_function(_add, (product, *bias)) if bias else product
            result.meta.update(node.meta)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        """Return what the compile cache keys this pass by."""
        return get_hash_for_files((__file__, linear.__file__, tiling.__file__))


def _plain_addmms(graph: fx.Graph) -> list[fx.Node]:
    """Return the products with a bias that is added as it is."""
    return [node for node in graph.find_nodes(op="call_function", target=_addmm) if not node.kwargs]


def _untransposed(node: object) -> fx.Node | None:
    """Return the weight that the node is the transpose of, if it is one that the op has a kernel for."""
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
