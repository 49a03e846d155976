"""The arguments of a node by the names of its op's signature: positional or not, defaults filled in."""

from __future__ import annotations

from typing import Any

from torch import fx


def arguments_of(node: fx.Node, signature: type[Any]) -> Any:
    """Return the arguments of a call of an op as ``signature``, its tuple in ``contracts``, with nodes for tensors."""
    return signature(*node.args, **node.kwargs)


def set_arguments(node: fx.Node, arguments: tuple[Any, ...]) -> None:
    node.args, node.kwargs = tuple(arguments), {}
