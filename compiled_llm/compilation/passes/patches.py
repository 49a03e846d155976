"""The pass that makes matmuls of the convolutions with which encoders embed patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from compiled_llm.compat.torch.tensors import example_of


def multiply_patches(graph: fx.Graph) -> None:
    """Replace 3D convolutions whose kernel is as large as their input, a patch, by matmuls of both, flattened."""
    # cuDNN allocates memory of its own for sizes that it has not seen, and no capture of a CUDA graph survives that.
    for node in graph.find_nodes(op="call_function", target=torch.conv3d):
        if (given := _of_patches(*node.args, **node.kwargs)) is None:
            continue
        patches, weight, bias = given
        with graph.inserting_before(node):
            flat = [graph.call_function(torch.flatten, (tensor, 1)) for tensor in (patches, weight)]
            product = graph.call_function(torch.nn.functional.linear, (*flat, bias))
            shaped = graph.call_method("view", (product, -1, example_of(weight).shape[0], 1, 1, 1))
        shaped.meta = node.meta
        node.replace_all_uses_with(shaped)
        graph.erase_node(node)


def _of_patches(
    patches: Any,
    weight: Any,
    bias: Any = None,
    stride: object = 1,
    padding: object = 0,
    dilation: object = 1,
    groups: object = 1,
) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Return what is convolved, if a kernel has one place in it."""
    given = example_of(patches).shape, example_of(weight).shape
    sizes, kernel = (tuple(shape[1:]) for shape in given)
    fixed = all(isinstance(size, int) for size in (*sizes, *kernel))
    alone = groups == 1 and all(one == 0 for one in (padding if isinstance(padding, (tuple, list)) else (padding,)))
    return (patches, weight, bias) if fixed and alone and sizes == kernel else None
