"""Products of few rows with a weight: what a decode step is made of.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from compiled_llm_ops.contracts import SkinnyLinear
from compiled_llm_ops.kernels.linear_tiling import MOST_ROWS, Tiling, choose
from compiled_llm_ops.library import define


def skinny_linear(rows: Tensor, weight: Tensor, overlap: bool = False, ahead: bool = False) -> Tensor:
    """``rows @ weight.T`` that reads the weight at memory speed where there are few rows.

    Args:
        rows: ``[M, I]``, any strides.
        weight: ``[O, I]``, contiguous, of the same dtype.
        overlap: whether CUDA may run it while the kernels in front and behind run, under the rules of
            ``compiled_llm_ops.kernels.overlap``; what is in front of it must not write ``weight`` then.
        ahead: whether the kernel behind may begin before this one has waited for the one in front; of effect with
            ``overlap`` and one or two rows. The weight that is read behind is on its way sooner then, and delays what
            the kernel in front still reads.

    Returns:
        ``[M, O]``, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        Measurement. On the CPU, for a few rows the BLAS that torch brings reads ``weight`` 2 to 6 times faster as the
        left factor of a matrix product than as the right one or in a matrix-vector product. On CUDA, with compute
        capability 9.0, float16 or bfloat16 and up to 64 rows, Triton kernels of our own where they were faster than
        cuBLAS (``compiled_llm_ops.kernels.linear_tiling``), else cuBLAS. The same inputs give the same bits each time.
    """
    out: Tensor = _skinny_linear(rows, weight, overlap, ahead)
    return out


def has_kernel(weight: Tensor, rows: int | None = None) -> bool:
    """Whether ``skinny_linear`` has something better than ``torch.mm`` for so many rows.

    Args:
        weight: ``[O, I]``, contiguous; may be a fake tensor.
        rows: how many; any number if None.
    """
    if weight.device.type == "cpu":
        return weight.dtype is torch.float32
    counts = range(1, MOST_ROWS + 1) if rows is None else [rows]
    return any(tiling_of(count, weight) is not None for count in counts)


def _check(args: SkinnyLinear) -> None:
    rows, weight = args.rows, args.weight
    if rows.dim() != 2 or weight.dim() != 2 or rows.shape[1] != weight.shape[1] or rows.dtype != weight.dtype:
        raise ValueError(
            "skinny_linear: rows must be [M, I] and weight [O, I] of one dtype; got "
            f"{tuple(rows.shape)} {rows.dtype} and {tuple(weight.shape)} {weight.dtype}"
        )


def _weight_goes_left(count: int, outputs: int) -> bool:
    return count <= 4 or (count <= 8 and outputs >= 8192)


def _cpu(args: SkinnyLinear) -> Tensor:
    _check(args)
    rows, weight = args.rows, args.weight
    count, outputs = rows.shape[0], weight.shape[0]
    if not _weight_goes_left(count, outputs):
        return torch.mm(rows, weight.t())
    columns = (rows if count > 1 else torch.cat([rows, rows])).t()  # with one, BLAS would multiply a vector
    return torch.mm(weight, columns)[:, :count].t().contiguous()


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors the device has, 0 if the kernels were not made for it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def tiling_of(count: int, weight: Tensor) -> Tiling | None:
    """Return how a product of ``count`` rows is cut up for kernels of our own, None if cuBLAS does it."""
    if not processors(weight.device) or weight.dtype not in (torch.float16, torch.bfloat16):
        return None
    return choose(count, weight.shape[0], weight.shape[1], processors(weight.device))


def _cuda(args: SkinnyLinear) -> Tensor:
    from compiled_llm_ops.kernels.overlap import possible

    _check(args)
    rows, weight = args.rows.contiguous(), args.weight
    tiling = tiling_of(rows.shape[0], weight)
    if tiling is None or not weight.is_contiguous() or rows.data_ptr() % 16 or weight.data_ptr() % 16:
        return torch.mm(rows, weight.t())
    from compiled_llm_ops.kernels.linear import multiply

    with torch.cuda.device(rows.device):  # Triton launches on the current one
        return multiply(rows, weight, tiling, ahead=args.ahead, pdl=args.overlap and possible(rows.device))


_skinny_linear = define(
    "skinny_linear",
    SkinnyLinear,
    fake=lambda args: args.rows.new_empty(args.rows.shape[0], args.weight.shape[0]),
    cpu=_cpu,
    cuda=_cuda,
)
