"""Passes of batch-invariant programs: matmuls and sums become ops whose bits do not depend on the number of rows."""

# What is left to Inductor are operations on single numbers, which it is told to round as PyTorch does, wherever it
# fuses them: so a decode step and a prefill, whose graphs it fuses otherwise, have the same bits.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from compiled_llm.compat.torch.inductor import CustomGraphPass, get_hash_for_files
from compiled_llm.compilation.passes.products import rule_files

if TYPE_CHECKING:
    from torch.fx.node import Argument


_aten = torch.ops.aten
_LINEAR = torch.ops.compiled_llm.invariant_linear.default
_BMM = torch.ops.compiled_llm.invariant_bmm.default
_SUM = torch.ops.compiled_llm.invariant_sum.default
_AS_STRIDED = _aten.as_strided.default

_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution"})
_MATMULS |= {"_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm"}
_SUMS = frozenset({"sum", "mean", "var", "std", "var_mean", "prod", "cumsum", "cumprod", "logcumsumexp", "_softmax"})
_SUMS |= {"logsumexp", "linalg_vector_norm", "norm", "native_layer_norm", "_fused_rms_norm", "native_group_norm"}


class InvariantProducts:
    """A pass that turns linear layers into ``invariant_linear``, after those that make one layer of several.

    Ops that know two orders of sums are told to take the one that does not depend on the batch.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if (place := _place_of_order(node.target)) is None:
                continue
            if place < len(node.args):  # where another pass has set all arguments
                node.update_arg(place, True)
            else:
                node.update_kwarg("invariant", True)
        for node in graph.find_nodes(op="call_function", target=nn.functional.linear):
            _replace(graph, node, *_in_order(node, "input", "weight", "bias"))
        for node in graph.find_nodes(op="call_function", target=torch.bmm):  # a projection's halves
            node.target = _BMM
        for node in graph.find_nodes(op="call_function", target=torch.addmm):  # the linear layers of GPT-2
            if set(node.kwargs) <= {"input", "mat1", "mat2"}:
                bias, rows, transposed = _in_order(node, "input", "mat1", "mat2")
                with graph.inserting_before(node):
                    weight = graph.call_method("t", (transposed,))
                _replace(graph, node, rows, weight, bias)


def _place_of_order(target: object) -> int | None:
    """Return which argument of an op is ``invariant``, by which bits depend on a row's tokens alone."""
    schema = getattr(target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return names.index("invariant") if "invariant" in names else None


def _in_order(node: fx.Node, *names: str) -> list[Any]:
    """Return the arguments of these names, positional or not; None for those that are not given."""
    return [node.args[at] if at < len(node.args) else node.kwargs.get(name) for at, name in enumerate(names)]


def _is_given(weight: object) -> bool:
    """Whether no kernel of the graph writes a weight, which may be asked for before earlier ones have ended."""
    while isinstance(weight, fx.Node) and (weight.target is _AS_STRIDED or weight.op == "call_method"):
        weight = weight.args[0] if weight.target in (_AS_STRIDED, "t") else None
    return isinstance(weight, fx.Node) and weight.op in ("placeholder", "get_attr")


def _replace(graph: fx.Graph, node: fx.Node, rows: Argument, weight: Argument, bias: Argument) -> None:
    with graph.inserting_before(node):
        product = graph.call_function(_LINEAR, (rows, weight, bias, _is_given(weight)))
    product.meta.update(node.meta)
    node.replace_all_uses_with(product)
    graph.erase_node(node)


class InvariantSums(CustomGraphPass):
    """A pass that turns sums, means and variances over the last dimension into ``invariant_sum``, or raises."""

    # Bits of a matmul, or of a sum of another kind, may depend on the number of rows.

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            name = _name_of(node)
            if name in _MATMULS or (name in _SUMS and _is_floating(node)):
                make = _MAKERS.get(node.target)
                result = make(_Building(graph, node), *node.args, **node.kwargs) if make is not None else None
                if result is None:
                    raise RuntimeError(
                        f"batch_invariant=True: the model's graph has {node.target}, and there is no kernel for it "
                        "whose bits do not depend on the number of rows; wrap the model without batch_invariant"
                    )
                if isinstance(result, tuple):
                    for user in list(node.users):
                        user.replace_all_uses_with(result[user.args[1]])
                        graph.erase_node(user)
                else:
                    node.replace_all_uses_with(result)
                graph.erase_node(node)

    def uuid(self) -> bytes:
        """Return the key of this pass in the compile cache: the text of all that decides its work."""
        return get_hash_for_files(tuple(map(str, rule_files())))


def _name_of(node: fx.Node) -> str:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return ""
    return str(node.target.overloadpacket.__name__)


def _is_floating(node: fx.Node) -> bool:
    """Whether numbers are added whose order matters; those of integers have one sum."""
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return bool(first.is_floating_point())


class _Building:
    """New nodes in front of one that they replace, with their examples."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self._graph, self._node = graph, node

    def __call__(self, target: torch._ops.OpOverload, *arguments: Argument) -> fx.Node:
        with self._graph.inserting_before(self._node):
            made = self._graph.call_function(target, arguments)
        made.meta["val"] = target(*(entry.meta["val"] if isinstance(entry, fx.Node) else entry for entry in arguments))
        return made

    def as_dtype(self, values: fx.Node, dtype: torch.dtype) -> fx.Node:
        if values.meta["val"].dtype == dtype:
            return values
        return self(torch.ops.prims.convert_element_type.default, values, dtype)

    def total(self, values: fx.Node, keep: bool) -> fx.Node:
        """Return the sums over the last dimension, of float32 or wider numbers."""
        total = self(_SUM, values)
        return self(_aten.unsqueeze.default, total, -1) if keep else total


def _is_last(values: fx.Node, dims: object) -> bool:
    """Whether numbers are added over the last dimension alone, whose size is known."""
    shape = values.meta["val"].shape
    if not isinstance(dims, (list, tuple)) or not shape or not isinstance(shape[-1], int):
        return False
    return [dim % len(shape) for dim in dims] == [len(shape) - 1]


def _wide(build: _Building, values: fx.Node) -> fx.Node:
    dtype = values.meta["val"].dtype
    return values if dtype == torch.float64 else build.as_dtype(values, torch.float32)


def _sum(
    build: _Building, values: fx.Node, dims: object = None, keep: bool = False, dtype: torch.dtype | None = None
) -> fx.Node | None:
    if not _is_last(values, dims):
        return None
    return build.as_dtype(build.total(_wide(build, values), keep), dtype or values.meta["val"].dtype)


def _mean(
    build: _Building, values: fx.Node, dims: object = None, keep: bool = False, dtype: torch.dtype | None = None
) -> fx.Node | None:
    if not _is_last(values, dims):
        return None
    mean = build(_aten.div.Tensor, build.total(_wide(build, values), keep), values.meta["val"].shape[-1])
    return build.as_dtype(mean, dtype or values.meta["val"].dtype)


def _var_mean(
    build: _Building, values: fx.Node, dims: object = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[fx.Node, fx.Node] | None:
    if not _is_last(values, dims):
        return None
    wide, count, dtype = _wide(build, values), values.meta["val"].shape[-1], values.meta["val"].dtype
    mean = build(_aten.div.Tensor, build.total(wide, True), count)
    distance = build(_aten.sub.Tensor, wide, mean)
    squares = build.total(build(_aten.mul.Tensor, distance, distance), keepdim)
    var = build(_aten.div.Tensor, squares, count - (1 if correction is None else correction))
    mean = mean if keepdim else build(_aten.squeeze.dim, mean, -1)
    return build.as_dtype(var, dtype), build.as_dtype(mean, dtype)


def _var(build: _Building, values: fx.Node, dims: object = None, **options: Any) -> fx.Node | None:
    found = _var_mean(build, values, dims, **options)
    return None if found is None else found[0]


def _outer(build: _Building, left: fx.Node, right: fx.Node) -> fx.Node | None:
    """Return the products of numbers, such as those of positions and frequencies: nothing is added."""
    if left.meta["val"].shape[2] != 1 or right.meta["val"].shape[1] != 1:
        return None
    return build(_aten.mul.Tensor, left, right)


_MAKERS: dict[Any, Callable[..., fx.Node | tuple[fx.Node, fx.Node] | None]] = {
    _aten.sum.dim_IntList: _sum,
    _aten.mean.dim: _mean,
    _aten.var_mean.correction: _var_mean,
    _aten.var.correction: _var,
    _aten.bmm.default: _outer,  # before PyTorch 2.12, Inductor leaves it a matmul
}
"""The function that builds each op's replacement; it returns None for arguments that it has no replacement for."""
