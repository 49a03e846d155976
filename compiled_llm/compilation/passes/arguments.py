"""What a node gives to an op, by the names of the op's own signature: positional or not, defaults filled in."""

from __future__ import annotations

from typing import Any

from torch import fx


def arguments_of(node: fx.Node, signature: type[Any]) -> Any:
    """Return what a call of an op gives it, as ``signature``, its tuple in ``compiled_llm_ops.contracts``.

    Nodes stand in the tensors' places.
    """
    return signature(*node.args, **node.kwargs)


def set_arguments(node: fx.Node, arguments: tuple[Any, ...]) -> None:
    """Let a call of an op take these arguments, in the order of its signature."""
    node.args, node.kwargs = tuple(arguments), {}
