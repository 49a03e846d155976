"""The kernel that the rule chooses is launched."""

# Shapes: M rows, N outputs, K inputs.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, linear, scaled_mm

from compiled_llm_ops.kernels.linear.skinny_tiling import processors_of
from compiled_llm_ops.packed.formats import PackedWeight
from compiled_llm_ops.packed.kernels import joined, rounded, tiles
from compiled_llm_ops.packed.kernels.few_rows import multiply_few
from compiled_llm_ops.packed.kernels.unpacking import unpack_into
from compiled_llm_ops.packed.rule import MAX_BLOCK, Choice, Library, choose
from compiled_llm_ops.packed.tilings import (
    FewRowsTiling,
    PackedLinearTiling,
    RoundedTiling,
    block_inputs,
    can_be_together,
)
from compiled_llm_ops.packed.unpack import unpack

UNPACKING_CAPABILITY = {"e4m3": (8, 9)}  # from which on Triton converts codes; (8, 0) for others


def multiply(rows: Tensor, weight: PackedWeight, bias: Tensor | None, *, pdl: bool) -> Tensor:
    """Return ``rows @ weight.T + bias``, ``[M, N]`` contiguous, for rows ``[M, K]``, contiguous."""
    choice = choose(len(rows), weight, rows.dtype, processors_of(rows.device))
    return multiply_as(choice, rows, weight, bias, pdl=pdl)


def multiply_each(rows: Tensor, weights: Sequence[PackedWeight], bias: Tensor | None, *, pdl: bool) -> Tensor:
    """Return the products of rows ``[M, K]``, contiguous, with several weights alike, one after the other, ``[M, N]``.

    Apart, if one launch cannot have them all.
    """
    outputs = [weight.shape[0] for weight in weights]
    whole = weights[0]._replace(shape=(sum(outputs), rows.shape[1]))
    choice = choose(len(rows), whole, rows.dtype, processors_of(rows.device))
    if choice is Library.UNPACKED:
        return linear(rows, unpacked(weights, rows.dtype), bias)
    if isinstance(choice, PackedLinearTiling) and choice.joined and can_be_together(weights, rows.dtype):
        return joined.multiply_together(rows, weights, bias, choice, pdl=pdl and choice.overlap)
    biases = [None] * len(weights) if bias is None else bias.split(outputs)
    apart = zip(weights, biases, strict=True)
    return torch.cat([multiply(rows, weight, own, pdl=pdl) for weight, own in apart], -1)


def multiply_as(choice: Choice, rows: Tensor, weight: PackedWeight, bias: Tensor | None, *, pdl: bool) -> Tensor:
    """Return ``rows @ weight.T + bias`` by the kernel that is chosen."""
    if isinstance(choice, PackedLinearTiling):
        kernel = joined.multiply if choice.joined else tiles.multiply
        return kernel(rows, weight, bias, choice, pdl=pdl and choice.overlap)
    if isinstance(choice, RoundedTiling):
        return rounded.multiply(rows, weight, bias, choice, pdl=pdl)
    if isinstance(choice, FewRowsTiling):
        return multiply_few(rows, weight, bias, choice, pdl=pdl)
    if choice is Library.UNPACKED:
        return linear(rows, unpacked([weight], rows.dtype), bias)
    out = _multiply_rounded_by_cublas(rows, weight, pdl=pdl)
    return out if bias is None else out + bias


def unpacked(weights: Sequence[PackedWeight], dtype: torch.dtype) -> Tensor:
    """Return the values of weights alike ``[N, K]``, by a kernel for each if Triton has it for the device."""
    format, codes = weights[0].format, weights[0].codes
    inputs, needed = block_inputs(format, MAX_BLOCK), UNPACKING_CAPABILITY.get(format.code, (8, 0))
    outputs = [weight.shape[0] for weight in weights]
    values = torch.empty(sum(outputs), weights[0].shape[1], dtype=dtype, device=codes.device)
    plain = not inputs or torch.cuda.get_device_capability(codes.device) < needed
    for weight, own in zip(weights, values.split(outputs), strict=True):
        if plain:
            own.copy_(unpack(weight, dtype))
        else:
            unpack_into(own, weight, inputs)
    return values


def _multiply_rounded_by_cublas(rows: Tensor, weight: PackedWeight, *, pdl: bool) -> Tensor:
    """Multiply rows that are rounded by 128 inputs with a weight of e4m3 by blocks, as transformers' formula does."""
    in_e4m3, scales = rounded.round_rows(rows, pdl=pdl)
    out = scaled_mm(
        in_e4m3, weight.codes.t(), scales, ScalingType.BlockWise1x128, weight.scales.t(), ScalingType.BlockWise128x128,
        output_dtype=rows.dtype,
    )  # fmt: skip
    return out[: len(rows)]
