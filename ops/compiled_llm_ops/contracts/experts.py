"""What the ops and kernels of experts take."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

EXPERT_ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu", "relu2")
"""What ``fused_experts`` knows; ``"gelu"`` is that of the error function, ``"relu2"`` the square of ``"relu"``."""


class ExpertsLinear(NamedTuple):
    rows: Tensor
    topk_ids: Tensor
    weight: Tensor
    bias: Tensor | None = None
    transposed: bool = False


class FusedExperts(NamedTuple):
    states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    activation: str = "silu"
    gated: bool = True
    transposed: bool = False
