"""What attention inside segments takes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SegmentAttention(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    starts: Tensor
    scale: float
    longest: int = 0
