"""Matmuls with a weight of 4 or 8 bits, which is read as it lies in memory."""

# Shapes: M rows, K inputs, N outputs.

from __future__ import annotations

import torch
from torch import Tensor, nn

from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.packed.contracts import PackedLinear
from compiled_llm_ops.packed.formats import PackedWeight, check_weight
from compiled_llm_ops.packed.unpack import unpack

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@define_op(PackedLinear)
def packed_linear(args: PackedLinear) -> Tensor:
    """``rows @ weight.T + bias`` with a weight of 4 or 8 bits; ``multiply_packed`` takes a ``PackedWeight``.

    Args:
        rows: ``[..., K]``, bfloat16, float16 or float32, any strides.
        codes: as ``layout`` says, ``[N, K]`` or ``[N, K / 2]`` in rows; contiguous. ``PackedFormat`` explains it, as
            it does ``code``, ``layout`` and ``may_round``.
        scales: ``[N / group_outputs, K / group_inputs]``, both rounded up, of dtype float32, bfloat16 or float16; any
            strides. Of dtype uint8 with ``nested``.
        zeros: None, or like ``scales``: integers are taken from unsigned codes, other numbers are added after scaling.
        nested: None, or ``[257 + b]`` float32, by which scales of 8 bits are read: 256 values, an offset, and a factor
            for each 256 scales.
        bias: None or ``[N]``, of the rows' dtype.
        outputs: N.
        code: what a code is.
        layout: where codes lie.
        group_outputs: how many outputs share a scale; 0 for all.
        group_inputs: how many inputs share a scale; 0 for all.
        may_round: whether a kernel may round rows to e4m3, by 128 inputs.
        overlap: as of ``skinny_linear``: the previous kernel must write nothing of the weight then, nor its tables.
            Products that would take longer so begin after it all the same (``PackedLinearTiling.overlap``).

    Returns:
        ``[..., N]``, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        Weights are scaled after the product with a group's inputs, as in AWQ's kernels
        (https://arxiv.org/abs/2306.00978), and codes become bfloat16 by their bits alone, as in "Who Says Elephants
        Can't Run" (https://arxiv.org/abs/2211.10017). On CUDA a Triton kernel of our own multiplies few rows, and a
        weight is unpacked for cuBLAS if there are many. Sums have a fixed order: the same inputs give the same bits.
    """
    return args.rows.new_empty(*args.rows.shape[:-1], args.outputs)


def multiply_packed(rows: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, overlap: bool = False) -> Tensor:
    """Return ``rows @ weight.T + bias``, ``[..., N]``, for rows ``[..., K]``; errors are those of ``packed_linear``."""
    (code, layout, outputs, inputs, may_round), codes, scales, zeros, shape, nested = weight
    return packed_linear(
        rows, codes, scales, zeros, nested, bias, shape[0], code, layout, outputs, inputs, may_round, overlap
    )


def why_no_kernel(weight: PackedWeight, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why ``packed_linear`` cannot multiply rows of this type with a weight there, None if it can."""
    if dtype not in DTYPES:
        return f"activations are {dtype}, and kernels take {', '.join(map(str, DTYPES))}"
    if device.type not in ("cpu", "cuda"):
        return f"there are no kernels for {device.type}"
    return None


def scratch_bytes(weight: PackedWeight, dtype: torch.dtype) -> int:
    """Return how many bytes a product of many rows needs for the unpacked weight."""
    return weight.shape[0] * weight.shape[1] * dtype.itemsize


def check_rows(op: str, rows: Tensor, bias: Tensor | None, outputs: int) -> None:
    """Raise ValueError if an op cannot multiply rows of this kind, or a bias does not fit them and the outputs."""
    if rows.dtype not in DTYPES or rows.dim() < 1:
        raise ValueError(
            f"{op}: rows must be [..., K] of {', '.join(map(str, DTYPES))}; got {tuple(rows.shape)} {rows.dtype}"
        )
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != rows.dtype):
        raise ValueError(f"{op}: bias must be [{outputs}] {rows.dtype}; got {tuple(bias.shape)} {bias.dtype}")


def _check(args: PackedLinear) -> None:
    check_rows("packed_linear", args.rows, args.bias, args.outputs)
    check_weight("packed_linear", args.weight)


@kernel_of(packed_linear, "CPU")
def _cpu(args: PackedLinear) -> Tensor:
    _check(args)
    return nn.functional.linear(args.rows, unpack(args.weight, args.rows.dtype), args.bias).contiguous()


@kernel_of(packed_linear, "CUDA")
def _cuda(args: PackedLinear) -> Tensor:
    from compiled_llm_ops.kernels.pdl import has_pdl
    from compiled_llm_ops.packed.kernels.launching import multiply

    _check(args)
    rows = args.rows.reshape(-1, args.rows.shape[-1]).contiguous()
    with torch.cuda.device(rows.device):  # Triton launches on the current one
        out = multiply(rows, args.weight, args.bias, pdl=args.overlap and has_pdl(rows.device))
    return out.view(*args.rows.shape[:-1], args.outputs)
