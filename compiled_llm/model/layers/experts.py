"""Mixtures of experts: HuggingFace's layers choose, and ops of ours compute what was chosen."""

# A layer's experts ask HuggingFace's ``ExpertsInterface`` for a function by the name in their config. While one of our
# programs runs, its thread reads our name there (``attention_switch``). What the ops cannot do goes to the function
# that the config really names. Shapes: T rows, k experts of each, H size of a row, I size between both products.

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from compiled_llm.compat.experts import (
    activation_of,
    are_experts,
    gated,
    has_plain_gate,
    is_parallel,
    knows,
    norms_answers,
    own_forward,
    register,
)
from compiled_llm.compat.torch.tensors import is_wrapper
from compiled_llm_ops import experts_linear, fused_experts

logger = logging.getLogger("compiled_llm.experts")

NAME = "compiled_llm"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute a layer's experts for rows ``[T, H]``, by choices and weights ``[T, k]``; HuggingFace's protocol."""
    if obstacle(module) is not None:
        return own_forward(module)(module, hidden_states, top_k_index, top_k_weights)
    up, up_bias, down, down_bias = _weights(module)
    rows, has_gate, transposed = hidden_states.to(up.dtype), bool(module.has_gate), bool(module.is_transposed)
    activation = activation_of(module) if _is_plain(module) else None
    if activation is not None:
        out = fused_experts(
            rows, top_k_index, top_k_weights, up, down, up_bias, down_bias, activation, has_gate, transposed
        )
        return out.to(hidden_states.dtype)
    projected = experts_linear(rows, top_k_index, up, up_bias, transposed)
    between = gated(module, projected) if has_gate else module.act_fn(projected)
    answers = experts_linear(between.to(up.dtype), top_k_index, down, down_bias, transposed)
    if norms_answers(module):
        answers = module.post_expert_norm(answers)
    weighted = answers.view(*top_k_index.shape, answers.shape[-1]) * top_k_weights[..., None]
    return weighted.sum(dim=1).to(hidden_states.dtype)


def obstacle(module: nn.Module) -> str | None:
    """Return why HuggingFace's function has to compute a layer's experts; None if ours does."""
    if is_parallel(module):
        return "processes share them"
    up, _, down, _ = _weights(module)
    if up is None or down is None:
        return "their weights are not where those of HuggingFace's experts are"
    if is_wrapper(up) or is_wrapper(down):
        return "their weights are quantised"
    if up.dtype not in DTYPES or up.dtype != down.dtype:
        return f"their weights are of {up.dtype} and {down.dtype}"
    return None if up.dim() == 3 and down.dim() == 3 else f"their weights have {up.dim()} and {down.dim()} dimensions"


def _weights(module: Any) -> tuple[Any, Any, Any, Any]:
    """Return the weights of both products, and their biases; None for what a layer has not."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, name, None), getattr(module, "down_proj", None)
    if not module.has_bias:
        return up, None, down, None
    return up, getattr(module, f"{name}_bias", None), down, getattr(module, "down_proj_bias", None)


def _is_plain(module: nn.Module) -> bool:
    """Whether nothing but an activation, and a gate's product, stands between and after both products."""
    return not norms_answers(module) and (not module.has_gate or has_plain_gate(module))


def experts_of(model: nn.Module) -> dict[str, int]:
    """Count the layers of experts: those that our ops compute as ``"compiled_llm"``, others by the reason."""
    layers = [module for module in model.modules() if are_experts(module)]
    if any(not knows(type(module), NAME) for module in layers):
        return {"their weights are quantised": len(layers)}  # such experts have an interface of their own
    return dict(Counter(obstacle(module) or NAME for module in layers))


def experts_name(counted: Mapping[str, int]) -> str | None:
    """Return the name by which experts are read while our programs run; None for that in their config."""
    return NAME if NAME in counted else None


def log_others(model: nn.Module, counted: Mapping[str, int]) -> None:
    """Log which layers' experts HuggingFace computes."""
    for reason, count in counted.items():
        if reason != NAME:
            logger.warning(
                "HuggingFace's implementation computes the experts of %d layers of %s: %s; these steps are slower, and "
                "may wait on the device",
                count,
                type(model).__name__,
                reason,
            )


register(NAME, experts_forward)
