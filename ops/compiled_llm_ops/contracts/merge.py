"""What the ops and kernels that merge results of attention take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class MergeState(NamedTuple):
    v_a: Tensor
    s_a: Tensor
    v_b: Tensor
    s_b: Tensor


class MergeStates(NamedTuple):
    v: Tensor
    s: Tensor


class MergeStateInPlace(NamedTuple):
    v: Tensor
    s: Tensor
    v_other: Tensor
    s_other: Tensor
    mask: Tensor | None = None
