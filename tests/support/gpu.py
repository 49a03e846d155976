"""What GPU tests share: seeds, dtypes and how close results have to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

SEED = 20240607
DTYPES = [torch.bfloat16, torch.float16]

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
seeded = pytest.mark.parametrize("seed", [SEED], ids="seed={}".format)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def close(actual: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    torch.testing.assert_close(
        actual, expected, atol=tolerance, rtol=tolerance, msg=lambda difference: f"{name}: {difference}"
    )


def on_gpu(arguments: Sequence[Any]) -> Any:
    """Arguments of an op, named ones too, with their tensors on the GPU."""
    moved = [own.cuda() if isinstance(own, Tensor) else own for own in arguments]
    if hasattr(arguments, "_fields"):
        return type(arguments)(*moved)
    return moved if isinstance(arguments, list) else tuple(moved)


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of a call and what that returned, after one that has its kernels compiled and loaded."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out
