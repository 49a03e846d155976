"""A residual sum, its norm and the matmul that reads it, which lie between attention and MLP of a decode step."""

# Shapes: M rows, I inputs, O outputs.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts.linear import NormedLinear
from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.linear import linear
from compiled_llm_ops.linear.norm import add_rms_norm, check_norm


@define_op(NormedLinear)
def normed_linear(args: NormedLinear) -> tuple[Tensor, Tensor]:
    """Add, divide each row of the sum by its root mean square, and multiply the normed rows with a weight.

    Args:
        states: ``[..., I]``, contiguous.
        update: ``[..., I]``, like ``states``, of the same dtype.
        norm: ``[I]`` of the same dtype, multiplied with the normed rows.
        epsilon: added to the mean square.
        weight: ``[O, I]`` of the same dtype, contiguous.
        gated: whether the first half of the outputs goes through SiLU and is multiplied with the second, as the MLPs of
            Llama and Qwen do it (SwiGLU).
        overlap: whether it may run at the same time as the previous and the next kernel on CUDA, by the rules of
            ``compiled_llm_ops.kernels.pdl``; the previous kernel must not write ``norm`` or ``weight`` then.

    Returns:
        ``[..., I]``, the sum, and ``[..., O]``, the product, ``[..., O / 2]`` if it is gated; both contiguous, of the
        same dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        https://arxiv.org/abs/1910.07467 and https://arxiv.org/abs/2002.05202, rounded where HuggingFace's Llama does
        it. On CUDA, one row is one Triton kernel of our own, or two if many programs would norm it; more rows are
        ``add_rms_norm`` and ``skinny_linear``.
    """
    states, outputs = args.states, args.weight.shape[0]
    product = states.new_empty((*states.shape[:-1], outputs // 2 if args.gated else outputs))
    return states.new_empty(states.shape), product


def _check(args: NormedLinear) -> None:
    states, weight = args.states, args.weight
    if weight.dim() != 2 or weight.shape[1] != states.shape[-1] or weight.dtype != states.dtype:
        raise ValueError(
            "normed_linear: states must be [..., I] and weight [O, I] of one dtype; got "
            f"{tuple(states.shape)} {states.dtype} and {tuple(weight.shape)} {weight.dtype}"
        )
    if args.gated and weight.shape[0] % 2:
        raise ValueError(f"normed_linear: {weight.shape[0]} outputs have no two halves: gated takes an even number")


def _gated(product: Tensor, overlap: bool) -> Tensor:
    if product.is_cuda:
        from compiled_llm_ops.kernels.linear.norm import silu_and_mul
        from compiled_llm_ops.kernels.pdl import has_pdl

        with torch.cuda.device(product.device):  # Triton launches on the current one
            return silu_and_mul(product, pdl=overlap and has_pdl(product.device))
    first, second = product.chunk(2, -1)
    return torch.nn.functional.silu(first) * second


@kernel_of(normed_linear, "CPU")
def _composed(args: NormedLinear) -> tuple[Tensor, Tensor]:
    """Run one op after the other, for any number of rows on any device."""
    _check(args)
    total, normed = add_rms_norm(args.states, args.update, args.norm, args.epsilon, args.overlap)
    product = linear.skinny_linear(normed.view(-1, normed.shape[-1]), args.weight, args.overlap)
    product = _gated(product, args.overlap) if args.gated else product
    return total, product.view(*args.states.shape[:-1], -1)


@kernel_of(normed_linear, "CUDA")
def _cuda(args: NormedLinear) -> tuple[Tensor, Tensor]:
    _check(args)
    check_norm(args.states, args.update, args.norm)
    one_row = args.states.numel() == args.states.shape[-1] and linear.has_kernel(args.weight, rows=1)
    if not one_row or not all(map(_is_readable, (args.states, args.update, args.norm, args.weight))):
        return _composed(args)
    with torch.cuda.device(args.states.device):  # Triton launches on the current one
        return _launch(args)


def _launch(args: NormedLinear) -> tuple[Tensor, Tensor]:
    from compiled_llm_ops.kernels.linear import norm as triton_norm
    from compiled_llm_ops.kernels.linear.skinny import Normed, multiply_few
    from compiled_llm_ops.kernels.linear.skinny_tiling import choose_normed_tiling, processors_of, tiling_for
    from compiled_llm_ops.kernels.pdl import has_pdl

    states, weight = args.states, args.weight
    pdl = args.overlap and has_pdl(states.device)
    tiling = choose_normed_tiling(weight.shape[0], weight.shape[1], processors_of(weight.device))
    if tiling is not None:
        total = torch.empty_like(states)
        normed = Normed(args.update, args.norm, args.epsilon, total)
        product = multiply_few(states.view(1, -1), weight, tiling, normed=normed, gated=args.gated, pdl=pdl)
    else:
        tiling = tiling_for(1, weight)
        assert tiling is not None
        total, row = triton_norm.add_rms_norm(states, args.update, args.norm, args.epsilon, pdl=pdl)
        product = multiply_few(row.view(1, -1), weight, tiling, gated=args.gated, pdl=pdl)
    return total, product.view(*states.shape[:-1], -1)


def _is_readable(tensor: Tensor) -> bool:
    """Whether the kernel reads it as it is, 16 bytes at a time."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
