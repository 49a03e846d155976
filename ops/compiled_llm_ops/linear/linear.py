"""Matmuls of few rows with a weight, the largest part of a decode step."""

# Shapes: M rows, I inputs, O outputs.

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from compiled_llm_ops.contracts.linear import SkinnyLinear
from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.linear import onednn


@define_op(SkinnyLinear)
def skinny_linear(args: SkinnyLinear) -> Tensor:
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
        Measurement. On AMD's processors, the BLAS that torch brings (MKL) reads ``weight`` up to 4 times faster as the
        left factor of a matmul of few rows than as the right one or in a matrix-vector product, and oneDNN is faster
        with more; on Intel's, the left factor takes twice as long as the right one. On CUDA, with compute
        capability 9.0, float16 or bfloat16 and up to 512 rows, our own Triton kernels if they were faster than cuBLAS
        (``compiled_llm_ops.kernels.linear.skinny_tiling``), else cuBLAS. The same inputs give the same bits each time.
    """
    return args.rows.new_empty(args.rows.shape[0], args.weight.shape[0])


def has_kernel(weight: Tensor, rows: int | None = None) -> bool:
    """Whether ``skinny_linear`` is faster than ``torch.mm`` for so many rows, any if None; a fake weight will do."""
    if weight.device.type == "cpu":
        return weight.dtype is torch.float32 and mkl_is_slow()
    from compiled_llm_ops.kernels.linear.skinny_tiling import MAX_ROWS, tiling_for

    counts = range(1, MAX_ROWS + 1) if rows is None else [rows]
    return any(tiling_for(count, weight) is not None for count in counts)


def _check(args: SkinnyLinear) -> None:
    rows, weight = args.rows, args.weight
    if rows.dim() != 2 or weight.dim() != 2 or rows.shape[1] != weight.shape[1] or rows.dtype != weight.dtype:
        raise ValueError(
            "skinny_linear: rows must be [M, I] and weight [O, I] of one dtype; got "
            f"{tuple(rows.shape)} {rows.dtype} and {tuple(weight.shape)} {weight.dtype}"
        )


MAX_COLUMNS = 3072
"""Numbers in all columns up to which MKL, where it is slow, is fastest with the weight on the left: 12 KB of them."""

CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def mkl_is_slow() -> bool:
    """Whether torch's BLAS is MKL on a processor of AMD's, where it reads a weight slowly as the right factor."""
    # Only if torch has oneDNN, too, which is the way out.
    if not (torch.backends.mkl.is_available() and onednn.is_available()):
        return False
    return CPUINFO.exists() and "AuthenticAMD" in CPUINFO.read_text()


def rows_left(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(rows, weight.t())


def weight_left(rows: Tensor, weight: Tensor) -> Tensor:
    if rows.shape[0] > 1:
        return torch.mm(weight, rows.t()).t().contiguous()
    both = torch.cat([rows, rows])  # with one, MKL would multiply a vector
    return torch.mm(weight, both.t())[:, :1].t().contiguous()


def product_on_cpu(count: int, inputs: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the fastest product of so many rows in float32; where MKL is fast, that which ``nn.Linear`` runs, too."""
    # Fitted on a processor of AMD's and one of Intel's; ``tools/fit_tilings.py --only cpu-linear`` measures it again.
    if not mkl_is_slow():
        return rows_left
    return weight_left if max(count, 2) * inputs <= MAX_COLUMNS else onednn.linear


@kernel_of(skinny_linear, "CPU")
def _cpu(args: SkinnyLinear) -> Tensor:
    _check(args)
    rows, weight = args.rows, args.weight
    multiply = product_on_cpu(*rows.shape) if weight.dtype is torch.float32 else rows_left
    return multiply(rows, weight)


@kernel_of(skinny_linear, "CUDA")
def _cuda(args: SkinnyLinear) -> Tensor:
    from compiled_llm_ops.kernels.linear.skinny_tiling import tiling_for
    from compiled_llm_ops.kernels.pdl import has_pdl

    _check(args)
    rows, weight = args.rows.contiguous(), args.weight
    tiling = tiling_for(rows.shape[0], weight)
    if tiling is None or not weight.is_contiguous() or rows.data_ptr() % 16 or weight.data_ptr() % 16:
        return torch.mm(rows, weight.t())
    from compiled_llm_ops.kernels.linear.skinny import multiply

    with torch.cuda.device(rows.device):  # Triton launches on the current one
        return multiply(rows, weight, tiling, trigger_first=args.ahead, pdl=args.overlap and has_pdl(rows.device))
