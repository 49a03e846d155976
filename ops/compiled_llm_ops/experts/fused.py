"""The whole of a layer's experts: up, activation, down, and the sum over the experts of a row."""

# Shapes: T rows, k experts of each, P = T * k pairs of a row and one of its experts, E experts, H size of a row, I size
# between both products.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

from compiled_llm_ops.contracts.experts import EXPERT_ACTIVATIONS, FusedExperts
from compiled_llm_ops.experts.checks import as_outputs_by_inputs, check_choices, check_weight
from compiled_llm_ops.experts.linear import of_expert, rows_of_experts
from compiled_llm_ops.library import define_op, kernel_of

_ON_CPU: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda states: states,
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": lambda states: gelu(states, approximate="tanh"),
    "relu": relu,
    "relu2": lambda states: relu(states).square(),
}


@define_op(FusedExperts)
def fused_experts(args: FusedExperts) -> Tensor:
    """Send each row through the experts that it chose, and add what they answer by their weights.

    An expert computes ``down @ (activation(gate @ x) * (up @ x))``, or ``down @ activation(up @ x)`` without a gate.

    Args:
        states: ``[T, H]``, float16, bfloat16 or float32, any strides.
        topk_ids: ``[T, k]`` int32 or int64, the experts of each row. A number outside of 0 to E - 1 stands for none.
        topk_weights: ``[T, k]``, of any floating dtype.
        up: ``[E, 2 * I, H]`` if gated, the gate's outputs first, else ``[E, I, H]``; the two last dimensions are
            exchanged if transposed. Of the states' dtype, any strides.
        down: ``[E, H, I]``, or ``[E, I, H]`` if transposed.
        up_bias: ``[E, 2 * I]`` or ``[E, I]``, of the states' dtype, or None.
        down_bias: ``[E, H]``, of the states' dtype, or None.
        activation: ``"none"``, ``"silu"``, ``"gelu"`` (by the error function), ``"gelu_tanh"``, ``"relu"`` or
            ``"relu2"``.
        gated: whether ``up`` has a gate.
        transposed: whether weights have their inputs first.

    Returns:
        ``[T, H]``, contiguous, of the states' dtype; zeros for rows without an expert.

    Raises:
        ValueError: shapes or dtypes do not fit together, or the activation is not known.

    Source:
        MegaBlocks (https://arxiv.org/abs/2211.15841), and Switch Transformers (https://arxiv.org/abs/2101.03961).
        Triton kernels of our own on CUDA: three launches for up to 64 rows, in which each expert that a row chose is
        read once, and the others are not. With more rows these are sorted by expert first. Grids follow from shapes, so
        CUDA graphs replay it with other choices.
    """
    return args.states.new_empty(args.states.shape)


def _check(args: FusedExperts) -> tuple[Tensor, Tensor]:
    """Return both weights as ``[E, outputs, inputs]``."""
    op, states, ids = "fused_experts", args.states, args.topk_ids
    check_choices(op, states, ids)
    if states.shape[0] != ids.shape[0] or args.topk_weights.shape != ids.shape:
        raise ValueError(
            f"{op}: states, topk_ids and topk_weights must be [T, H], [T, k] and [T, k]; got {tuple(states.shape)}, "
            f"{tuple(ids.shape)} and {tuple(args.topk_weights.shape)}"
        )
    if args.activation not in EXPERT_ACTIVATIONS:
        known = ", ".join(EXPERT_ACTIVATIONS)
        raise ValueError(f"{op}: activation must be one of {known}; got {args.activation!r}")
    up, down = (as_outputs_by_inputs(weight, args.transposed) for weight in (args.up, args.down))
    size = states.shape[1]
    check_weight(op, "up", up, args.up_bias, states, (None, size))
    between = up.shape[1] // (2 if args.gated else 1)
    check_weight(op, "down", down, args.down_bias, states, (size, between))
    if len(up) != len(down) or up.shape[1] != between * (2 if args.gated else 1):
        raise ValueError(f"{op}: up {tuple(up.shape)} and down {tuple(down.shape)} are not of the same experts")
    return up, down


@kernel_of(fused_experts, "CPU")
def _cpu(args: FusedExperts) -> Tensor:
    up, down = _check(args)
    states, (rows, chosen) = args.states, args.topk_ids.shape
    answers = states.new_zeros(rows * chosen, states.shape[1])
    for expert, pairs in rows_of_experts(args.topk_ids, len(up)):
        between = _between(args, of_expert(states[pairs // chosen], up, args.up_bias, expert))
        answers[pairs] = of_expert(between, down, args.down_bias, expert)
    weighted = answers.view(rows, chosen, states.shape[1]) * args.topk_weights[..., None]
    return weighted.sum(dim=1).to(states.dtype)


def _between(args: FusedExperts, projected: Tensor) -> Tensor:
    activate = _ON_CPU[args.activation]
    if not args.gated:
        return activate(projected)
    gate, up = projected.chunk(2, dim=1)
    return activate(gate) * up


@kernel_of(fused_experts, "CUDA")
def _cuda(args: FusedExperts) -> Tensor:
    from compiled_llm_ops.kernels.experts.products import Epilogue, add_by_weight, multiply, routed

    up, down = _check(args)
    states, ids = args.states.contiguous(), args.topk_ids.contiguous()
    out, answers = states.new_empty(states.shape), states.new_empty(ids.numel(), states.shape[1])
    between = states.new_empty(ids.numel(), down.shape[2])
    with torch.cuda.device(states.device):  # Triton launches on the current one
        routing = routed(ids, len(up))
        multiply(states, routing, up, args.up_bias, between, Epilogue(args.activation, args.gated))
        multiply(between, routing, down, args.down_bias, answers)
        add_by_weight(answers, ids, args.topk_weights.contiguous(), out, len(up))
    return out
