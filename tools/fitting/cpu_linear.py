"""Matmuls on a CPU: `linear/linear.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from compiled_llm_ops.linear import linear, onednn
from fitting.cases import Case, Machine
from fitting.measuring import LARGER_THAN_CACHES, by_the_clock


def cpu_linear_cases(_: Machine, quick: bool) -> Iterator[Case]:
    """The rows or the weight as the left factor, in torch's BLAS, or oneDNN."""
    weights = [(576, 576), (1536, 576), (49_152, 576)]
    more_weights = [(960, 576), (576, 1536), (4096, 1024), (8192, 1024), (12_288, 4096)]
    products = (linear.rows_left, linear.weight_left, onednn.linear)
    for outputs, inputs in weights if quick else weights + more_weights:
        for count in (1, 4, 8, 16) if quick else (1, 2, 3, 4, 5, 6, 8, 12, 16, 64, 256):
            prepare = lambda given=(count, outputs, inputs): cpu_linear_timer(*given)  # noqa: E731
            name, chosen = f"N={outputs}, K={inputs}, M={count}", linear.product_on_cpu(count, inputs).__name__
            yield Case("cpu-linear", name, {product.__name__: product for product in products}, chosen, prepare)


def cpu_linear_timer(count: int, outputs: int, inputs: int) -> Callable[[Callable[[Tensor, Tensor], Tensor]], float]:
    rows, weight = torch.randn(count, inputs), torch.randn(outputs, inputs)
    copies = 1 + LARGER_THAN_CACHES // (weight.numel() * weight.element_size())
    weights = itertools.cycle([weight, *(weight.clone() for _ in range(copies - 1))])
    return lambda product: by_the_clock(lambda: product(rows, next(weights)), lambda: None, seconds=0.05)
