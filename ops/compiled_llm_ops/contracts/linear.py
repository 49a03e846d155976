"""What the ops and kernels of matmuls and norms take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AddRmsNorm(NamedTuple):
    states: Tensor
    update: Tensor
    weight: Tensor
    epsilon: float
    overlap: bool = False


class SkinnyLinear(NamedTuple):
    rows: Tensor
    weight: Tensor
    overlap: bool = False
    ahead: bool = False


class NormedLinear(NamedTuple):
    states: Tensor
    update: Tensor
    norm: Tensor
    epsilon: float
    weight: Tensor
    gated: bool = False
    overlap: bool = False


class ChainedLinear(NamedTuple):
    rows: Tensor
    weight: Tensor
    states: Tensor
    norm: Tensor
    epsilon: float
    next_weight: Tensor
    gated: bool = False
    overlap: bool = False


class InvariantLinear(NamedTuple):
    rows: Tensor
    weight: Tensor
    bias: Tensor | None = None
    overlap: bool = False


class InvariantBmm(NamedTuple):
    rows: Tensor
    matrices: Tensor


class InvariantSum(NamedTuple):
    values: Tensor
