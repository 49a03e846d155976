"""What the ops and kernels of recurrent layers take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CausalConv1d(NamedTuple):
    tokens: Tensor
    weight: Tensor
    bias: Tensor | None
    states: Tensor
    token_rows: Tensor
    qo_indptr: Tensor
    read: Tensor
    write: Tensor
    activation: str = "none"
    invariant: bool = False


class GatedDeltaRule(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    states: Tensor
    qo_indptr: Tensor
    read: Tensor
    write: Tensor
    scale: float
    normalize: bool = False
    invariant: bool = False


class SelectiveScan(NamedTuple):
    tokens: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    states: Tensor
    qo_indptr: Tensor
    read: Tensor
    write: Tensor
    invariant: bool = False
