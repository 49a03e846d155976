"""A sum, its norm and the product that reads it, which lie between attention and MLP of a decode step.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.kernels.linear_tiling import choose_normed
from compiled_llm_ops.kernels.overlap import possible
from compiled_llm_ops.library import define
from compiled_llm_ops.linear import linear, norm


def normed_linear(
    states: Tensor,
    update: Tensor,
    norm: Tensor,
    epsilon: float,
    weight: Tensor,
    gated: bool = False,
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """Add, divide each row of the sum by its root mean square, and multiply the normed rows with a weight.

    Args:
        states: ``[..., I]``, contiguous.
        update: ``[..., I]``, like ``states``, of the same dtype.
        norm: ``[I]`` of the same dtype, multiplied with the normed rows.
        epsilon: is added to the mean square.
        weight: ``[O, I]`` of the same dtype, contiguous.
        gated: whether the first half of the outputs goes through SiLU and is multiplied with the second, as the MLPs of
            Llama and Qwen do it (SwiGLU).
        overlap: whether CUDA may run it while the kernels in front and behind run, under the rules of
            ``compiled_llm_ops.kernels.overlap``; what is in front of it must not write ``norm`` or ``weight`` then.

    Returns:
        ``[..., I]``, the sum, and ``[..., O]``, the product, ``[..., O / 2]`` if it is gated; both contiguous, of the
        same dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        https://arxiv.org/abs/1910.07467 and https://arxiv.org/abs/2002.05202, rounded where HuggingFace's Llama does
        it. On CUDA, one row is one Triton kernel of our own, or two where many programs would norm it; more rows are
        ``add_rms_norm`` and ``skinny_linear``.
    """
    total, product = _normed_linear(states, update, norm, epsilon, weight, gated, overlap)
    return total, product


def _check(states: Tensor, weight: Tensor, gated: bool) -> None:
    if weight.dim() != 2 or weight.shape[1] != states.shape[-1] or weight.dtype != states.dtype:
        raise ValueError(
            "normed_linear: states must be [..., I] and weight [O, I] of one dtype; got "
            f"{tuple(states.shape)} {states.dtype} and {tuple(weight.shape)} {weight.dtype}"
        )
    if gated and weight.shape[0] % 2:
        raise ValueError(f"normed_linear: {weight.shape[0]} outputs have no two halves: gated takes an even number")


def _gated(product: Tensor) -> Tensor:
    first, second = product.chunk(2, -1)
    return torch.nn.functional.silu(first) * second


def _composed(
    states: Tensor,
    update: Tensor,
    norm_weight: Tensor,
    epsilon: float,
    weight: Tensor,
    gated: bool = False,
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    """Do one thing after the other, for any number of rows on any device."""
    _check(states, weight, gated)
    total, normed = norm.add_rms_norm(states, update, norm_weight, epsilon, overlap)
    product = linear.skinny_linear(normed.view(-1, states.shape[-1]), weight, overlap)
    product = product.view(*states.shape[:-1], -1)
    return total, _gated(product) if gated else product


def _cuda(
    states: Tensor,
    update: Tensor,
    norm_weight: Tensor,
    epsilon: float,
    weight: Tensor,
    gated: bool = False,
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    _check(states, weight, gated)
    norm.check(states, update, norm_weight)
    one_row = states.numel() == states.shape[-1] and linear.has_kernel(weight, rows=1)
    if not one_row or not all(map(_is_readable, (states, update, norm_weight, weight))):
        return _composed(states, update, norm_weight, epsilon, weight, gated, overlap)
    with torch.cuda.device(states.device):  # Triton launches on the current one
        return _launch(states, update, norm_weight, epsilon, weight, gated, overlap and possible(states.device))


def _launch(
    states: Tensor, update: Tensor, norm_weight: Tensor, epsilon: float, weight: Tensor, gated: bool, pdl: bool
) -> tuple[Tensor, Tensor]:
    from compiled_llm_ops.kernels.linear import Normed, multiply_few
    from compiled_llm_ops.kernels.norm import add_rms_norm

    (outputs, inputs), processors = weight.shape, linear.processors(weight.device)
    tiling = choose_normed(outputs, inputs, processors)
    if tiling is not None:
        total = torch.empty_like(states)
        normed = Normed(update, norm_weight, epsilon, total)
        product = multiply_few(states.view(1, -1), weight, tiling, normed=normed, gated=gated, pdl=pdl)
    else:
        tiling = linear.tiling_of(1, weight)
        assert tiling is not None
        total, row = add_rms_norm(states, update, norm_weight, epsilon, pdl=pdl)
        product = multiply_few(row.view(1, -1), weight, tiling, gated=gated, pdl=pdl)
    return total, product.view(*states.shape[:-1], -1)


def _is_readable(tensor: Tensor) -> bool:
    """Whether the kernel reads it as it is, 16 bytes at a time."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def _fake(
    states: Tensor,
    update: Tensor,
    norm_weight: Tensor,
    epsilon: float,
    weight: Tensor,
    gated: bool = False,
    overlap: bool = False,
) -> tuple[Tensor, Tensor]:
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    return states.new_empty(states.shape), states.new_empty((*states.shape[:-1], outputs))


_normed_linear = define(
    "normed_linear(Tensor states, Tensor update, Tensor norm, float epsilon, Tensor weight, bool gated=False, "
    "bool overlap=False) -> (Tensor, Tensor)",
    fake=_fake,
    cpu=_composed,
    cuda=_cuda,
)
