"""Matmuls of few rows with a weight, the largest part of a decode step.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.contracts import SkinnyLinear
from compiled_llm_ops.library import define


def skinny_linear(rows: Tensor, weight: Tensor, overlap: bool = False, ahead: bool = False) -> Tensor:
    """``rows @ weight.T`` that reads the weight at memory speed if there are few rows.

    Args:
        rows: ``[M, I]``, any strides.
        weight: ``[O, I]``, contiguous, of the same dtype.
        overlap: whether it may run at the same time as the previous and the next kernel on CUDA, by the rules of
            ``compiled_llm_ops.kernels.pdl``; the previous kernel must not write ``weight`` then.
        ahead: only with ``overlap`` and 1 or 2 rows: let the next kernel begin before this one has waited for the
            previous. The next kernel's weight is prefetched earlier, at the cost of bandwidth for the previous one.

    Returns:
        ``[M, O]``, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        Measurement. On the CPU, for a few rows the BLAS that torch brings reads ``weight`` 2 to 6 times faster as the
        left factor of a matmul than as the right one or in a matrix-vector product. On CUDA, with compute
        capability 9.0, float16 or bfloat16 and up to 64 rows, our own Triton kernels if they were faster than
        cuBLAS (``compiled_llm_ops.kernels.linear_tiling``), else cuBLAS. The same inputs give the same bits each time.
    """
    out: Tensor = _skinny_linear(rows, weight, overlap, ahead)
    return out


def has_kernel(weight: Tensor, rows: int | None = None) -> bool:
    """Whether ``skinny_linear`` is faster than ``torch.mm`` for this number of rows.

    Args:
        weight: ``[O, I]``, contiguous; may be a fake tensor.
        rows: how many; any number if None.
    """
    if weight.device.type == "cpu":
        return weight.dtype is torch.float32
    from compiled_llm_ops.kernels.linear_tiling import MAX_ROWS, tiling_for

    counts = range(1, MAX_ROWS + 1) if rows is None else [rows]
    return any(tiling_for(count, weight) is not None for count in counts)


def _check(args: SkinnyLinear) -> None:
    rows, weight = args.rows, args.weight
    if rows.dim() != 2 or weight.dim() != 2 or rows.shape[1] != weight.shape[1] or rows.dtype != weight.dtype:
        raise ValueError(
            "skinny_linear: rows must be [M, I] and weight [O, I] of one dtype; got "
            f"{tuple(rows.shape)} {rows.dtype} and {tuple(weight.shape)} {weight.dtype}"
        )


MAX_ROWS_LEFT, MAX_ROWS_LEFT_OF_LARGE, LARGE_WEIGHT = 4, 8, 8192
"""Rows up to which BLAS is faster with the weight on the left: with any weight, and with so many outputs or more."""


def weight_goes_left(count: int, outputs: int) -> bool:
    """Whether BLAS multiplies so many rows faster if the weight is the left factor.

    Fitted on a CPU with torch's own BLAS in float32; ``tools/fit_tilings.py --only cpu-linear`` measures it again.
    """
    return count <= MAX_ROWS_LEFT or (count <= MAX_ROWS_LEFT_OF_LARGE and outputs >= LARGE_WEIGHT)


def _cpu(args: SkinnyLinear) -> Tensor:
    _check(args)
    rows, weight = args.rows, args.weight
    count, outputs = rows.shape[0], weight.shape[0]
    if not weight_goes_left(count, outputs):
        return torch.mm(rows, weight.t())
    columns = (rows if count > 1 else torch.cat([rows, rows])).t()  # with one, BLAS would multiply a vector
    return torch.mm(weight, columns)[:, :count].t().contiguous()


def _cuda(args: SkinnyLinear) -> Tensor:
    from compiled_llm_ops.kernels.linear_tiling import tiling_for
    from compiled_llm_ops.kernels.pdl import has_pdl

    _check(args)
    rows, weight = args.rows.contiguous(), args.weight
    tiling = tiling_for(rows.shape[0], weight)
    if tiling is None or not weight.is_contiguous() or rows.data_ptr() % 16 or weight.data_ptr() % 16:
        return torch.mm(rows, weight.t())
    from compiled_llm_ops.kernels.linear import multiply

    with torch.cuda.device(rows.device):  # Triton launches on the current one
        return multiply(rows, weight, tiling, trigger_first=args.ahead, pdl=args.overlap and has_pdl(rows.device))


_skinny_linear = define(
    "skinny_linear",
    SkinnyLinear,
    fake=lambda args: args.rows.new_empty(args.rows.shape[0], args.weight.shape[0]),
    cpu=_cpu,
    cuda=_cuda,
)
