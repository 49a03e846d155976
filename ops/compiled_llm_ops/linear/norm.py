"""The residual sum and its norm, between the matmuls of a decode step."""

# Shapes: M rows, I inputs.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts.linear import AddRmsNorm
from compiled_llm_ops.library import define_op, kernel_of


@define_op(AddRmsNorm)
def add_rms_norm(args: AddRmsNorm) -> tuple[Tensor, Tensor]:
    """Add, and divide each row of the sum by its root mean square.

    Args:
        states: ``[..., I]``, contiguous.
        update: ``[..., I]``, like ``states``, of the same dtype.
        weight: ``[I]`` of the same dtype, multiplied with the normed rows.
        epsilon: added to the mean square.
        overlap: whether it may run at the same time as the previous and the next kernel on CUDA, by the rules of
            ``compiled_llm_ops.kernels.pdl``; the previous kernel must not write ``weight`` then.

    Returns:
        ``[..., I]``, the sum, and ``[..., I]``, the normed sum; both contiguous, of the same dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        https://arxiv.org/abs/1910.07467, rounded as in HuggingFace's Llama: the sum, the normed row and the
        result; in between it is float32. On CUDA our own Triton kernel.
    """
    return (args.states.new_empty(args.states.shape), args.states.new_empty(args.states.shape))


def check_norm(states: Tensor, update: Tensor, weight: Tensor) -> None:
    """Raise ValueError if shapes or dtypes of the sum and its norm do not fit together."""
    if states.shape != update.shape or weight.shape != states.shape[-1:]:
        raise ValueError(
            "add_rms_norm: states and update must be [..., I] and weight [I]; got "
            f"{tuple(states.shape)}, {tuple(update.shape)} and {tuple(weight.shape)}"
        )
    if not states.dtype == update.dtype == weight.dtype:
        raise ValueError(f"add_rms_norm: all must be of one dtype; got {states.dtype}, {update.dtype}, {weight.dtype}")


@kernel_of(add_rms_norm, "CPU")
def _cpu(args: AddRmsNorm) -> tuple[Tensor, Tensor]:
    check_norm(args.states, args.update, args.weight)
    total = args.states + args.update
    values = total.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + args.epsilon)
    return total, args.weight * values.to(total.dtype)


@kernel_of(add_rms_norm, "CUDA")
def _cuda(args: AddRmsNorm) -> tuple[Tensor, Tensor]:
    from compiled_llm_ops.kernels.linear import norm as triton_norm
    from compiled_llm_ops.kernels.pdl import has_pdl

    check_norm(args.states, args.update, args.weight)
    tensors = (args.states.contiguous(), args.update.contiguous(), args.weight.contiguous())
    device = args.states.device
    with torch.cuda.device(device):  # Triton launches on the current one
        return triton_norm.add_rms_norm(*tensors, args.epsilon, pdl=args.overlap and has_pdl(device))
