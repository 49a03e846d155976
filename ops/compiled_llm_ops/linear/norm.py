"""What lies between the products of a decode step: a layer's result is added to its input, and the sum is normed.

Shapes: M rows, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.kernels.overlap import possible
from compiled_llm_ops.library import define


def add_rms_norm(
    states: Tensor, update: Tensor, weight: Tensor, epsilon: float, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    """Add, and divide each row of the sum by its root mean square.

    Args:
        states: ``[..., I]``, contiguous.
        update: ``[..., I]``, like ``states``, of the same dtype.
        weight: ``[I]`` of the same dtype, multiplied with the normed rows.
        epsilon: is added to the mean square.
        overlap: whether CUDA may run it while the kernels in front and behind run, under the rules of
            ``compiled_llm_ops.kernels.overlap``; what is in front of it must not write ``weight`` then.

    Returns:
        ``[..., I]``, the sum, and ``[..., I]``, the normed sum; both contiguous, of the same dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        https://arxiv.org/abs/1910.07467, rounded where HuggingFace's Llama does it: the sum, the normed row and the
        result; in between it is float32. On CUDA a Triton kernel of our own.
    """
    total, normed = _add_rms_norm(states, update, weight, epsilon, overlap)
    return total, normed


def check(states: Tensor, update: Tensor, weight: Tensor) -> None:
    """Check what is added and normed.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    if states.shape != update.shape or weight.shape != states.shape[-1:]:
        raise ValueError(
            "add_rms_norm: states and update must be [..., I] and weight [I]; got "
            f"{tuple(states.shape)}, {tuple(update.shape)} and {tuple(weight.shape)}"
        )
    if not states.dtype == update.dtype == weight.dtype:
        raise ValueError(f"add_rms_norm: all must be of one dtype; got {states.dtype}, {update.dtype}, {weight.dtype}")


def _cpu(
    states: Tensor, update: Tensor, weight: Tensor, epsilon: float, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    check(states, update, weight)
    total = states + update
    numbers = total.float()
    numbers = numbers * torch.rsqrt(numbers.pow(2).mean(-1, keepdim=True) + epsilon)
    return total, weight * numbers.to(total.dtype)


def _cuda(
    states: Tensor, update: Tensor, weight: Tensor, epsilon: float, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    check(states, update, weight)
    from compiled_llm_ops.kernels import norm as triton_norm

    with torch.cuda.device(states.device):  # Triton launches on the current one
        given = (states.contiguous(), update.contiguous(), weight.contiguous())
        return triton_norm.add_rms_norm(*given, epsilon, pdl=overlap and possible(states.device))


def _fake(
    states: Tensor, update: Tensor, weight: Tensor, epsilon: float, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    return states.new_empty(states.shape), states.new_empty(states.shape)


_add_rms_norm = define(
    "add_rms_norm(Tensor states, Tensor update, Tensor weight, float epsilon, bool overlap=False) -> (Tensor, Tensor)",
    fake=_fake,
    cpu=_cpu,
    cuda=_cuda,
)
