"""A small module whose weights can be fused, and how many products a graph has before and after."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compiled_llm.model.weights.fused_weights import FusedGroup, FusedWeights, LinearRecorder


class Heads(nn.Module):
    """Three linear layers over one input, and one over another."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, outputs, bias) for outputs in (16, 8, 8))
        self.out = nn.Linear(24, 8, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x).view(*x.shape[:-1], 2, 8), self.k(x), self.v(x), self.out(x + 1)


def groups_of(module: nn.Module, *inputs: Tensor) -> list[FusedGroup]:
    with LinearRecorder() as recorder:
        module(*(inputs or (torch.randn(2, 24),)))
    return recorder.groups(module)


def fuse(module: nn.Module) -> FusedWeights:
    return FusedWeights(module, groups_of(module))


def storages(module: nn.Module, *names: str) -> set[int]:
    return {module.get_parameter(name).untyped_storage().data_ptr() for name in names}


QKV = ("q.weight", "k.weight", "v.weight")


class Products:
    """How many products each graph had before and after the pass."""

    def __init__(self) -> None:
        self.counts: list[tuple[int, int]] = []
