"""The pass that has regions agree on the layout of a tensor that ``torch.cat`` joins with empty ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from compiled_llm.compat.torch.tensors import example_of


def copy_lone_parts(graph: fx.Graph) -> None:
    """Let ``torch.cat`` of one tensor and empty ones be a contiguous copy of it, which its result is.

    Heads that rotary embedding turns whole are such, in code for heads of which it turns a part.
    """
    # Inductor drops the empty tensors, and copies the other with its strides: the next region would be compiled for
    # others than it gets.
    for node in graph.find_nodes(op="call_function", target=torch.cat):
        part = _lone_part(*node.args, **node.kwargs)
        if part is not None:
            node.target, node.args = torch.clone, (part,)
            node.kwargs = {"memory_format": torch.contiguous_format}


def _lone_part(tensors: Any, dim: Any = 0, **others: object) -> fx.Node | None:
    """Return the only part that is not empty, unless parts are unknown or of several dtypes."""
    known = isinstance(tensors, Sequence) and all("example_value" in getattr(part, "meta", {}) for part in tensors)
    if not known or not isinstance(dim, int) or others:
        return None
    filled: list[fx.Node] = [part for part in tensors if not _is_empty(example_of(part), dim)]
    if len(filled) != 1 or len(tensors) == 1 or len({example_of(part).dtype for part in tensors}) > 1:
        return None
    return filled[0]


def _is_empty(example: Tensor, dim: int) -> bool:
    # Tensors of one dimension and no numbers go with any others. A symbolic size would be guarded.
    size = example.shape[dim if example.dim() > 1 else 0]
    return isinstance(size, int) and size == 0
