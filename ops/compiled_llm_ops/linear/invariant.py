"""Matmuls and sums in which a row's bits depend on the row alone: not on how many there are, nor on its place."""

# Shapes: M rows, I inputs, O outputs.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts.linear import InvariantBmm, InvariantLinear, InvariantSum
from compiled_llm_ops.library import define_op, kernel_of

CPU_ROWS = 16  # rows that a CPU multiplies at a time; what is missing is filled up


@define_op(InvariantLinear)
def invariant_linear(args: InvariantLinear) -> Tensor:
    """``torch.nn.functional.linear`` in which the bits of a row of results depend on its row of inputs alone.

    Args:
        rows: ``[..., I]``, any strides.
        weight: ``[O, I]`` of the same dtype, any strides.
        bias: ``[O]`` of the same dtype, added before rounding; None for none.
        overlap: whether it may run at the same time as the previous and the next kernel on CUDA, by the rules of
            ``compiled_llm_ops.kernels.pdl``.

    Returns:
        ``[..., O]``, contiguous, of the same dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together, or CUDA has no kernel for the dtype.

    Source:
        On CUDA a Triton kernel of our own with one order of sums for all numbers of rows
        (``compiled_llm_ops.kernels.linear.invariant_tiling``), after
        https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/; sums are float32, and float32 is
        multiplied without TF32. On a CPU the BLAS that torch brings, which always gets blocks of 16 rows; another
        number of threads may give other bits.
    """
    return args.rows.new_empty((*args.rows.shape[:-1], args.weight.shape[0]))


@define_op(InvariantBmm)
def invariant_bmm(args: InvariantBmm) -> Tensor:
    """``torch.bmm`` in which the bits of a row of results depend on its row and its matrix alone.

    Args:
        rows: ``[H, M, I]``, any strides.
        matrices: ``[H, I, O]`` of the same dtype, any strides.

    Returns:
        ``[H, M, O]``, contiguous, of the same dtype.

    Raises:
        ValueError: shapes or dtypes do not fit together, or CUDA has no kernel for the dtype.

    Source:
        As ``invariant_linear``, with one tiling for all numbers of rows on CUDA:
        https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/.
    """
    (heads, count, _), outputs = args.rows.shape, args.matrices.shape[2]
    return args.rows.new_empty((heads, count, outputs))


@define_op(InvariantSum)
def invariant_sum(args: InvariantSum) -> Tensor:
    """``values.sum(-1)`` in which the bits of a sum depend on its numbers alone.

    Args:
        values: ``[..., I]`` of a floating dtype, any strides.

    Returns:
        ``[...]``, contiguous, of the same dtype; float16 and bfloat16 are added in float32.

    Raises:
        ValueError: the dtype is not floating, or there is no dimension.

    Source:
        On CUDA a Triton kernel of our own, one program for each sum; on a CPU PyTorch, on blocks of 16 sums. Why:
        https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/.
    """
    return args.values.new_empty(args.values.shape[:-1])


def _check(args: InvariantLinear) -> None:
    rows, weight, bias, _ = args
    if rows.dim() < 1 or weight.dim() != 2 or rows.shape[-1] != weight.shape[1] or rows.dtype != weight.dtype:
        raise ValueError(
            "invariant_linear: rows must be [..., I] and weight [O, I] of one dtype; got "
            f"{tuple(rows.shape)} {rows.dtype} and {tuple(weight.shape)} {weight.dtype}"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(
            f"invariant_linear: bias must be ({len(weight)},) {weight.dtype}; got {tuple(bias.shape)} {bias.dtype}"
        )


def _in_blocks(rows: Tensor) -> list[Tensor]:
    """Return rows ``[M, I]`` as blocks of CPU_ROWS, each aligned alike in memory of its own."""
    count = len(rows)
    blocks = []
    for start in range(0, count, CPU_ROWS):
        block = torch.zeros((CPU_ROWS, rows.shape[1]), dtype=rows.dtype, device="cpu")
        block[: min(CPU_ROWS, count - start)] = rows[start : start + CPU_ROWS]
        blocks.append(block)
    return blocks


@kernel_of(invariant_linear, "CPU")
def _cpu(args: InvariantLinear) -> Tensor:
    _check(args)
    rows, weight, bias, _ = args
    out = rows.new_empty((rows.numel() // max(1, rows.shape[-1]), len(weight)))
    for number, block in enumerate(_in_blocks(rows.reshape(len(out), rows.shape[-1]))):
        place = out[number * CPU_ROWS : (number + 1) * CPU_ROWS]
        product = torch.mm(block, weight.t()) if bias is None else torch.addmm(bias, block, weight.t())
        place.copy_(product[: len(place)])
    return out.view(*rows.shape[:-1], len(weight))


@kernel_of(invariant_linear, "CUDA")
def _cuda(args: InvariantLinear) -> Tensor:
    from compiled_llm_ops.kernels.linear.invariant import described, multiply
    from compiled_llm_ops.kernels.linear.invariant_tiling import invariant_linear_tiling, linear_device_of
    from compiled_llm_ops.kernels.pdl import has_pdl

    _check(args)
    rows, weight, bias, overlap = args
    flat = rows.reshape(-1, rows.shape[-1]).contiguous()
    flat = flat.clone() if flat.data_ptr() % 16 else flat  # or it would be read in another way
    device, sizes = weight.device, (len(flat), len(weight), weight.element_size())
    tiling = invariant_linear_tiling(*sizes, linear_device_of(device), described(weight))
    pdl = overlap and has_pdl(device)
    with torch.cuda.device(rows.device):  # Triton launches on the current one
        out = multiply(flat, weight, None if bias is None else bias.contiguous(), tiling, pdl)
    return out.view(*rows.shape[:-1], len(weight))


def _check_bmm(args: InvariantBmm) -> None:
    rows, matrices = args
    if rows.dim() != 3 or matrices.dim() != 3 or rows.shape[::2] != matrices.shape[:2] or rows.dtype != matrices.dtype:
        raise ValueError(
            "invariant_bmm: rows must be [H, M, I] and matrices [H, I, O] of one dtype; got "
            f"{tuple(rows.shape)} {rows.dtype} and {tuple(matrices.shape)} {matrices.dtype}"
        )


@kernel_of(invariant_bmm, "CPU")
def _bmm_on_cpu(args: InvariantBmm) -> Tensor:
    _check_bmm(args)
    heads, count, _ = args.rows.shape
    out = args.rows.new_empty((heads, count, args.matrices.shape[2]))
    for rows, matrix, own in zip(args.rows, args.matrices, out, strict=True):
        for number, block in enumerate(_in_blocks(rows)):
            place = own[number * CPU_ROWS : (number + 1) * CPU_ROWS]
            place.copy_(torch.mm(block, matrix)[: len(place)])
    return out


@kernel_of(invariant_bmm, "CUDA")
def _bmm_on_cuda(args: InvariantBmm) -> Tensor:
    from compiled_llm_ops.kernels.linear.invariant import multiply_each

    _check_bmm(args)
    with torch.cuda.device(args.rows.device):  # Triton launches on the current one
        return multiply_each(args.rows, args.matrices)


def _check_sum(args: InvariantSum) -> None:
    if not args.values.is_floating_point() or not args.values.dim():
        raise ValueError(
            f"invariant_sum: values must be [..., I] of a floating dtype; got {tuple(args.values.shape)} "
            f"{args.values.dtype}"
        )


@kernel_of(invariant_sum, "CPU")
def _sum_on_cpu(args: InvariantSum) -> Tensor:
    _check_sum(args)
    values = args.values
    out = values.new_empty(values.shape[:-1])
    flat = out.view(-1)
    for number, block in enumerate(_in_blocks(values.reshape(len(flat), values.shape[-1]))):
        place = flat[number * CPU_ROWS : (number + 1) * CPU_ROWS]
        place.copy_(block.sum(-1)[: len(place)])
    return out


@kernel_of(invariant_sum, "CUDA")
def _sum_on_cuda(args: InvariantSum) -> Tensor:
    from compiled_llm_ops.kernels.linear.invariant import sum_rows

    _check_sum(args)
    values = args.values.contiguous()
    with torch.cuda.device(values.device):  # Triton launches on the current one
        return sum_rows(values.view(-1, values.shape[-1])).view(values.shape[:-1])
