"""A matmul, the residual sum, its norm and the matmul that reads it, which lie between two attentions or gates."""

# Shapes: M rows, J inputs, I outputs of the first weight and inputs of the second, O outputs.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts.linear import ChainedLinear
from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.linear.linear import skinny_linear
from compiled_llm_ops.linear.normed_linear import normed_linear


@define_op(ChainedLinear)
def chained_linear(args: ChainedLinear) -> tuple[Tensor, Tensor]:
    """Multiply rows with a weight, add states, divide each sum by its root mean square, and multiply with a second one.

    Args:
        rows: ``[..., J]``, any strides.
        weight: ``[I, J]`` of the same dtype, contiguous.
        states: ``[..., I]``, contiguous, of the same dtype: the residual stream.
        norm: ``[I]`` of the same dtype, multiplied with the normed sums.
        epsilon: added to the mean square.
        next_weight: ``[O, I]`` of the same dtype, contiguous.
        gated: whether the first half of the outputs goes through SiLU and is multiplied with the second (SwiGLU).
        overlap: whether it may run at the same time as the previous and the next kernel on CUDA, by the rules of
            ``compiled_llm_ops.kernels.pdl``; the previous kernel must not write ``norm`` or a weight then.

    Returns:
        ``[..., I]``, the sum, and ``[..., O]``, the second product, ``[..., O / 2]`` if it is gated; both contiguous,
        of the same dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        https://arxiv.org/abs/1910.07467 and https://arxiv.org/abs/2002.05202. On CUDA, 2 to 256 rows in bfloat16 are
        two Triton kernels of our own where they were faster (``compiled_llm_ops.kernels.linear.chained_tiling``),
        which round the normed sum once where HuggingFace's Llama does so twice; all else is ``skinny_linear`` and
        ``normed_linear``.
    """
    states, outputs = args.states, args.next_weight.shape[0]
    product = states.new_empty((*states.shape[:-1], outputs // 2 if args.gated else outputs))
    return states.new_empty(states.shape), product


def has_chained_kernel(weight: Tensor, next_weight: Tensor, gated: bool) -> bool:
    """Whether ``chained_linear`` has kernels of its own for these weights, with some number of rows."""
    if weight.device.type == "cpu":
        return False
    from compiled_llm_ops.kernels.linear.chained_tiling import MAX_ROWS, chained_tiling_for

    counts = range(2, MAX_ROWS + 1)
    return any(chained_tiling_for(rows, weight, next_weight, gated) is not None for rows in counts)


def _check(args: ChainedLinear) -> None:
    rows, weight, states, next_weight = args.rows, args.weight, args.states, args.next_weight
    fits = weight.dim() == next_weight.dim() == 2 and rows.shape[:-1] == states.shape[:-1]
    if not fits or (rows.shape[-1], states.shape[-1]) != (weight.shape[1], weight.shape[0]):
        raise ValueError(
            "chained_linear: rows must be [..., J], weight [I, J] and states [..., I]; got "
            f"{tuple(rows.shape)}, {tuple(weight.shape)} and {tuple(states.shape)}"
        )
    if args.norm.shape != states.shape[-1:] or next_weight.shape[1] != states.shape[-1]:
        raise ValueError(
            f"chained_linear: norm must be [{states.shape[-1]}] and next_weight [O, {states.shape[-1]}]; got "
            f"{tuple(args.norm.shape)} and {tuple(next_weight.shape)}"
        )
    if args.gated and next_weight.shape[0] % 2:
        raise ValueError(
            f"chained_linear: {next_weight.shape[0]} outputs have no two halves: gated takes an even number"
        )
    dtypes = [tensor.dtype for tensor in (rows, weight, states, args.norm, next_weight)]
    if len(set(dtypes)) > 1:
        raise ValueError(f"chained_linear: all must be of one dtype; got {', '.join(map(str, dtypes))}")


@kernel_of(chained_linear, "CPU")
def _composed(args: ChainedLinear) -> tuple[Tensor, Tensor]:
    """Run one op after the other, for any number of rows on any device."""
    _check(args)
    update = skinny_linear(args.rows.reshape(-1, args.rows.shape[-1]), args.weight, args.overlap)
    return normed_linear(
        args.states, update.view_as(args.states), args.norm, args.epsilon, args.next_weight, args.gated, args.overlap
    )


@kernel_of(chained_linear, "CUDA")
def _cuda(args: ChainedLinear) -> tuple[Tensor, Tensor]:
    from compiled_llm_ops.kernels.linear.chained_tiling import chained_tiling_for

    _check(args)
    count = args.rows.numel() // args.rows.shape[-1]
    tiling = chained_tiling_for(count, args.weight, args.next_weight, args.gated)
    tensors = (args.rows, args.weight, args.states, args.norm, args.next_weight)
    if tiling is None or not all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors):
        return _composed(args)
    from compiled_llm_ops.kernels.linear.chained import multiply_and_add, multiply_scaled
    from compiled_llm_ops.kernels.pdl import has_pdl

    pdl = args.overlap and has_pdl(args.rows.device)
    rows, states = args.rows.view(count, -1), args.states.view(count, -1)
    with torch.cuda.device(rows.device):  # Triton launches on the current one
        given = multiply_and_add(rows, args.weight, states, args.norm, tiling, pdl=pdl)
        product = multiply_scaled(given, args.next_weight, args.epsilon, tiling, gated=args.gated, pdl=pdl)
    return given.total.view_as(args.states), product.view(*args.states.shape[:-1], -1)
