"""Matmuls of the same rows with several packed weights, wherever these lie."""

# Words along the inputs (GPTQ) of several layers are no one tensor of words, however they are laid side by side, and
# words along the outputs (AWQ) are neither; and where scales have 8 bits themselves (NF4), each weight has an offset of
# its own. So one launch is given the places of all.
# Shapes: M rows, K inputs, N outputs of all weights.

from __future__ import annotations

import torch
from torch import Tensor, nn

from compiled_llm_ops.library import define_op, kernel_of
from compiled_llm_ops.packed.contracts import PackedLinears
from compiled_llm_ops.packed.formats import LAYOUTS, check_weight
from compiled_llm_ops.packed.linear import check_rows
from compiled_llm_ops.packed.unpack import unpack

_LAYOUTS = tuple(layout for layout in LAYOUTS if layout != "tiles")


@define_op(PackedLinears)
def packed_linears(args: PackedLinears) -> Tensor:
    """``packed_linear`` of the same rows with each of several weights, their outputs one after the other.

    The weights are alike but for their outputs, and have a scale for each output. On CUDA up to three are one launch,
    if all but the last have a multiple of 128 outputs and rows of codes begin at multiples of 16 bytes: words and NF4
    with any number of rows, others with more than a few. Each output has the bits that a launch for its weight alone
    gives it, cut up alike. More than three, and others, are multiplied one by one.

    Args:
        rows: ``[..., K]``, bfloat16, float16 or float32, any strides.
        codes: of each weight, as ``layout`` says: ``[N, K]`` or ``[N, K / 2]`` bytes, ``[K / 8, N]`` or ``[K, N / 8]``
            int32; contiguous.
        scales: of each weight, ``[N, K / group_inputs]``, rounded up, of dtype float32, bfloat16 or float16; any
            strides.
        zeros: of each weight, like ``scales``: integers are taken from unsigned codes, other numbers are added after
            scaling. Empty if there are none.
        nested: of each weight, ``[257 + b]`` float32, as of ``packed_linear``. Empty if there are none.
        bias: None or ``[N]`` for all outputs, of the rows' dtype.
        code: what a code is, as of ``PackedFormat``.
        layout: where codes lie, not ``tiles``.
        group_inputs: how many inputs share a scale; 0 for all.
        overlap: as of ``packed_linear``.

    Returns:
        ``[..., N]``, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit together, or there is no weight.

    Source:
        Words as GPTQ (https://arxiv.org/abs/2210.17323) and AWQ (https://arxiv.org/abs/2306.00978) are stored. The
        kernel is that of ``packed_linear``, in which each program takes the weight that has its tile.
    """
    return args.rows.new_empty(*args.rows.shape[:-1], sum(args.outputs))


def _check(args: PackedLinears) -> None:
    lengths = [len(own) for own in (args.codes, args.scales, args.zeros, args.nested)]
    if not lengths[0] or {*lengths[:2], *filter(None, lengths[2:])} != {lengths[0]} or args.layout not in _LAYOUTS:
        raise ValueError(
            "packed_linears: codes, scales, and zeros and nested, if there are any, must be of as many weights, one at "
            f"least, in {', '.join(_LAYOUTS)}; got {', '.join(map(str, lengths))} in {args.layout!r}"
        )
    check_rows("packed_linears", args.rows, args.bias, sum(args.outputs))
    for weight in args.weights:
        check_weight("packed_linears", weight)


@kernel_of(packed_linears, "CPU")
def _cpu(args: PackedLinears) -> Tensor:
    _check(args)
    values = torch.cat([unpack(weight, args.rows.dtype) for weight in args.weights])
    return nn.functional.linear(args.rows, values, args.bias).contiguous()


@kernel_of(packed_linears, "CUDA")
def _cuda(args: PackedLinears) -> Tensor:
    from compiled_llm_ops.kernels.pdl import has_pdl
    from compiled_llm_ops.packed.kernels.launching import multiply_each

    _check(args)
    rows = args.rows.reshape(-1, args.rows.shape[-1]).contiguous()
    with torch.cuda.device(rows.device):  # Triton launches on the current one
        out = multiply_each(rows, args.weights, args.bias, pdl=args.overlap and has_pdl(rows.device))
    return out.view(*args.rows.shape[:-1], out.shape[-1])
