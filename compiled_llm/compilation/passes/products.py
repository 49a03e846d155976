"""Passes over the compiled graphs: what makes every family faster without touching its model."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from compiled_llm import compat
from compiled_llm.compat import CustomGraphPass, example_of, get_hash_for_files, inputs_by_tensor
from compiled_llm.compilation.passes.normed_products import NORMED_LINEAR
from compiled_llm.compilation.passes.patterns import Formula, Found, rms_norm, rotary
from compiled_llm.model.fused_weights import FusedWeights, is_one
from compiled_llm_ops.attention.decode import Arguments
from compiled_llm_ops.kernels import linear_tiling as tiling
from compiled_llm_ops.linear import linear

_as_strided = torch.ops.aten.as_strided.default
_linear = nn.functional.linear
_VIEWS = [_as_strided, torch.ops.aten.slice.Tensor, torch.ops.aten.view.default]
_add_rms_norm = torch.ops.compiled_llm.add_rms_norm.default
_add = torch.ops.aten.add.Tensor
_mm = torch.ops.aten.mm.default
_addmm = torch.ops.aten.addmm.default
_reshape = torch.ops.aten.reshape.default
_permute = torch.ops.aten.permute.default
_skinny_linear = torch.ops.compiled_llm.skinny_linear.default
_decode_attentions = (
    torch.ops.compiled_llm.decode_attention.default,
    torch.ops.compiled_llm.decode_attention_lse.default,
)
_rotary, _rms_norm = Formula(rotary), Formula(rms_norm)


class PreparedInAttention:
    """Leaves norm and rotary embedding of queries and keys to decode attention, which has them in hand anyway.

    It runs over the graph as Dynamo made it, before any other pass: what nodes say of their tensors is still true.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place."""
        attentions = [node for node in graph.nodes if node.target in _decode_attentions]
        flat: dict[fx.Node, fx.Node] = {}
        for node in attentions:
            query, key = map(_raw, node.args[:2])
            if query is not None and key is not None and query.goes_with(key):
                _prepare_inside(graph, node, query, key, flat)
        if attentions and _table_is_settled(attentions):
            for node in attentions:
                node.args = _arguments(node)._replace(overlap=True)


class _Raw(NamedTuple):
    """Queries or keys of one token a row, before they are normed and turned.

    Attributes:
        states: ``[B, 1, heads, D]``.
        cos: ``[B, 1, D]``.
        sin: likewise.
        norm: ``[D]``, the weight of their norm; None where they have none.
        epsilon: what the norm adds; 0.0 without one.
        own: the nodes that norm and turn them, inputs first.
    """

    states: fx.Node
    cos: fx.Node
    sin: fx.Node
    norm: fx.Node | None
    epsilon: float
    own: list[fx.Node]

    def goes_with(self, other: _Raw) -> bool:
        """Whether both are turned alike, and normed alike if both are."""
        both_normed = self.norm is not None and other.norm is not None
        return (self.cos, self.sin) == (other.cos, other.sin) and (self.epsilon == other.epsilon or not both_normed)


def _raw(packed: Any) -> _Raw | None:
    """Return what ``[B, heads, D]`` was made of, if it is normed and turned, or only turned, as the op does it."""
    match = _rotary.match(packed)
    if match is None:
        return None
    found, own = match
    states, cos, sin = (found[name] for name in ("states", "cos", "sin"))
    example, angles = example_of(states), [example_of(cos), example_of(sin)]
    rows, tokens, _, size = example.shape
    if tokens != 1 or not isinstance(found["half"], int) or size != 2 * found["half"]:
        return None
    if any(angle.shape != (rows, 1, size) or angle.dtype != example.dtype for angle in angles):
        return None
    normed = _rms_norm.match(states)
    if normed is None or not _is_of(normed[0], example):
        return _Raw(states, cos, sin, None, 0.0, own)
    return _Raw(normed[0]["states"], cos, sin, normed[0]["weight"], normed[0]["epsilon"], [*normed[1], *own])


def _is_of(norm: Found, states: Tensor) -> bool:
    """Whether a norm multiplies what is like ``states`` with a weight for each column, all in one dtype."""
    weight, epsilon = norm["weight"], norm["epsilon"]
    if not isinstance(weight, fx.Node) or not isinstance(epsilon, (int, float)) or norm["dtype"] != states.dtype:
        return False
    example: Tensor = example_of(weight)
    return example.shape == states.shape[-1:] and example.dtype == states.dtype


def _prepare_inside(graph: fx.Graph, attention: fx.Node, query: _Raw, key: _Raw, flat: dict[fx.Node, fx.Node]) -> None:
    """Let an attention norm and turn its queries and keys.

    Args:
        graph: what all of them are in.
        attention: gets arguments that say with what.
        query: what its queries are made of.
        key: what its keys are made of.
        flat: cosines and sines as ``[B, D]``, by what they are in the graph; extended.
    """
    for angles in (query.cos, query.sin):
        if angles not in flat:
            with graph.inserting_after(angles):
                flat[angles] = graph.call_method("squeeze", (angles, 1))
    with graph.inserting_before(attention):
        packed = [graph.call_method("squeeze", (raw.states, 1)) for raw in (query, key)]
    attention.args = _arguments(attention)._replace(
        query=packed[0],
        key=packed[1],
        query_norm=query.norm,
        key_norm=key.norm,
        epsilon=query.epsilon or key.epsilon,
        cos=flat[query.cos],
        sin=flat[query.sin],
    )
    for node in (*reversed(key.own), *reversed(query.own)):
        if not node.users:
            graph.erase_node(node)


class NormedSums:
    """Makes one op of a sum and its norm, which lie between the products of a layer.

    It runs over the graph as Dynamo made it, like ``PreparedInAttention``.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place."""
        for node in graph.find_nodes(op="call_function", target=operator.mul):
            match = _rms_norm.match(node)
            if match is not None:
                _norm_sum(graph, node, *match)


def _norm_sum(graph: fx.Graph, normed: fx.Node, found: Found, own: Sequence[fx.Node]) -> None:
    """Replace a norm, and the sum that is normed if it is one of two tensors alike."""
    total = found["states"]
    if total.target is not operator.add or not all(isinstance(entry, fx.Node) for entry in total.args):
        return
    example = example_of(total)
    summands = map(example_of, total.args)
    if not _is_of(found, example):
        return
    if any((summand.shape, summand.dtype) != (example.shape, example.dtype) for summand in summands):
        return
    with graph.inserting_before(total):
        both = graph.call_function(_add_rms_norm, (*total.args, found["weight"], found["epsilon"], True))
        for number, node in enumerate((total, normed)):
            result = graph.call_function(operator.getitem, (both, number))
            result.meta.update(node.meta)
            node.replace_all_uses_with(result)
    for node in (*reversed(own), total):
        if not node.users:
            graph.erase_node(node)


def _arguments(attention: fx.Node) -> Any:
    """Return what an attention is given, nodes in place of tensors."""
    arguments: Any = attention.args
    return Arguments(*arguments)


def _table_is_settled(attentions: Sequence[fx.Node]) -> bool:
    """Return whether nothing in the graph touches a page table before the last attention has read it."""
    columns: list[Any] = [entry for node in attentions for entry in node.args[4:7]]
    tables = set(columns)
    users = {user for entry in tables for user in entry.users if user < attentions[-1]}
    return all(entry.op == "placeholder" for entry in tables) and users <= set(attentions)


class OuterProducts:
    """Makes multiplications of matrix products over one number, which rotary embeddings take their angles from.

    It runs over the graph as Dynamo made it. A launch of cuBLAS becomes a part of a kernel of Inductor's.
    """

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place."""
        for node in graph.find_nodes(op="call_function", target=operator.matmul):
            column, row = map(example_of, node.args)
            if column.dim() > 1 and row.dim() > 1 and isinstance(column.shape[-1], int) and column.shape[-1] == 1:
                node.target = operator.mul


class FusedProducts:
    """Turns the products of one input with a group's weights into one product, which each of them takes its part of.

    It runs over the graph as Dynamo made it, so that what reads the parts is traced with their strides: an op that
    takes any strides gets them as they are, and nothing is copied.
    """

    def __init__(self, weights: FusedWeights) -> None:
        """Prepare.

        Args:
            weights: the groups; whenever the graph runs they must be ``intact``.
        """
        self._weights = weights

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the graph in place."""
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
    """Return a product's weight, and its bias if it has one."""
    return tuple(entry for entry in product.args[1:] if entry is not None)


def _fuse(graph: fx.Graph, products: Sequence[fx.Node], stacks: Sequence[Sequence[Tensor]]) -> None:
    """Replace products, in the order of their weights in memory, by parts of one.

    Args:
        graph: what they are in.
        products: calls of ``linear``, all with the same first argument.
        stacks: their weights, and their biases if they have any, each one after the other in one storage.
    """
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


def _whole(graph: fx.Graph, first: Any, stack: Sequence[Tensor]) -> fx.Node:
    """Return all of a stack, as seen from its first entry; without an offset it begins where that does."""
    size = [sum(map(len, stack)), *stack[0].shape[1:]]
    return graph.call_function(_as_strided, (first, size, list(stack[0].stride())))


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
                product = graph.call_function(_skinny_linear, (rows, weight, True, _is_of_product(rows)))
                product.meta["val"] = node.meta["val"]
                result = graph.call_function(_add, (product, *bias)) if bias else product
            result.meta.update(node.meta)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        graph.eliminate_dead_code()

    def uuid(self) -> bytes:
        """Return what the compile cache keys this pass by."""
        return get_hash_for_files((__file__, compat.__file__, linear.__file__, tiling.__file__))


def _is_of_product(rows: object) -> bool:
    """Whether a product with a norm has given rows; unlike attention, it waits for nothing that weights could delay."""
    while isinstance(rows, fx.Node) and rows.target in (_reshape, *_VIEWS):
        rows = rows.args[0]
    if not isinstance(rows, fx.Node) or rows.target is not operator.getitem:
        return False
    given = rows.args[0]
    return isinstance(given, fx.Node) and given.target is NORMED_LINEAR


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
