"""Products of few rows with a weight: what a decode step is made of.

Shapes: M rows, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.library import define


def skinny_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight.T`` that reads the weight at memory speed where there are few rows.

    Args:
        rows: ``[M, I]``, any strides.
        weight: ``[O, I]``, contiguous, of the same dtype.

    Returns:
        ``[M, O]``, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        Measurement, on the CPU: for a few rows the BLAS that torch brings reads ``weight`` 2 to 6 times faster as the
        left factor of a matrix product than as the right one or in a matrix-vector product. On CUDA cuBLAS.
    """
    out: Tensor = _skinny_linear(rows, weight)
    return out


def _check(rows: Tensor, weight: Tensor) -> None:
    if rows.dim() != 2 or weight.dim() != 2 or rows.shape[1] != weight.shape[1] or rows.dtype != weight.dtype:
        raise ValueError(
            "skinny_linear: rows must be [M, I] and weight [O, I] of one dtype; got "
            f"{tuple(rows.shape)} {rows.dtype} and {tuple(weight.shape)} {weight.dtype}"
        )


def _weight_goes_left(count: int, outputs: int) -> bool:
    return count <= 4 or (count <= 8 and outputs >= 8192)


def _cpu(rows: Tensor, weight: Tensor) -> Tensor:
    _check(rows, weight)
    count, outputs = rows.shape[0], weight.shape[0]
    if not _weight_goes_left(count, outputs):
        return torch.mm(rows, weight.t())
    columns = (rows if count > 1 else torch.cat([rows, rows])).t()  # with one, BLAS would multiply a vector
    return torch.mm(weight, columns)[:, :count].t().contiguous()


def _cuda(rows: Tensor, weight: Tensor) -> Tensor:
    _check(rows, weight)
    return torch.mm(rows, weight.t())


def _fake(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


_skinny_linear = define("skinny_linear(Tensor rows, Tensor weight) -> Tensor", fake=_fake, cpu=_cpu, cuda=_cuda)
