"""What a packed weight stands for, in plain PyTorch: the reference of all kernels."""

# Shapes: N outputs, K inputs.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm_ops.packed.formats import (
    CENTRES,
    NESTED_BLOCK,
    NESTED_CODES,
    NF4,
    TILE_INPUTS,
    TILE_OUTPUTS,
    TILE_PIECE,
    WORD_OUTPUTS,
    PackedFormat,
    PackedWeight,
)


def unpack(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values ``[N, K]`` that a packed weight stands for, computed in float32 (in float64 if that is asked).

    Args:
        weight: as its format says.
        dtype: of the result.
    """
    exact = torch.float64 if dtype is torch.float64 else torch.float32
    zeros = None if weight.zeros is None else _by_input(weight.zeros, weight)
    taken = zeros if zeros is not None and not zeros.is_floating_point() else None
    values = _numbers(weight, taken).to(exact) * _by_input(scales_of(weight).to(exact), weight)
    if zeros is not None and zeros.is_floating_point():
        values += zeros.to(exact)
    return values.to(dtype)


def scales_of(weight: PackedWeight) -> Tensor:
    """Return the scales, ``[N / outputs, K / inputs]``, in float32 if they have 8 bits themselves."""
    if weight.nested is None:
        return weight.scales
    nested, after = weight.nested, NESTED_CODES + 1
    values, offset, factors = nested[:NESTED_CODES], nested[NESTED_CODES:after], nested[after:]
    each = factors.repeat_interleave(NESTED_BLOCK)[: weight.scales.numel()].view(weight.scales.shape)
    return values[weight.scales.int()] * each + offset


def _by_input(table: Tensor, weight: PackedWeight) -> Tensor:
    """Return a table ``[N / outputs, K / inputs]`` as ``[N, K]``."""
    for dim, (size, shared) in enumerate(zip(weight.shape, weight.format[2:4], strict=True)):
        places = torch.arange(size, device=table.device)
        table = table.index_select(dim, places // (shared or size))
    return table


def _numbers(weight: PackedWeight, zeros: Tensor | None) -> Tensor:
    """Return what codes stand for before they are scaled, ``[N, K]``."""
    code, codes = weight.format.code, weight.codes
    if code in ("e4m3", "int8") and weight.format.layout == "rows":
        return codes.float()
    unsigned = _unsigned(weight.format, codes)[: weight.shape[0], : weight.shape[1]]
    if code == "nf4":
        return torch.tensor(NF4, device=codes.device)[unsigned]
    if code in CENTRES:
        return unsigned - (CENTRES[code] if zeros is None else zeros.int())
    half = 1 << (weight.format.bits - 1)
    return (unsigned ^ half) - half


def _unsigned(format: PackedFormat, codes: Tensor) -> Tensor:
    """Return the bits of each code as int32, ``[N, K]``, and what tiles add."""
    if format.layout in ("rows", "high_first"):
        numbers = codes.view(torch.uint8).int()
        if format.bits == 8:
            return numbers
        halves = [numbers & 15, numbers >> 4]
        return torch.stack(halves if format.layout == "rows" else halves[::-1], -1).flatten(1)
    parts = torch.stack([codes >> shift & (1 << format.bits) - 1 for shift in range(0, 32, format.bits)], -1)
    if format.layout == "words_by_input":
        return parts.transpose(1, 2).flatten(0, 1).t()
    if format.layout == "words_by_output":
        places = [WORD_OUTPUTS.index(output) for output in range(8)]
        return parts[..., places].flatten(1).t()
    tiles, blocks = codes.shape[:2]
    # Lane t of 32 has column t % 4 of output t // 4; the 8 codes of a word are two neighbours of each 8 inputs, and
    # the first of the neighbours of all come first.
    columns = parts.view(tiles, blocks, TILE_OUTPUTS, 4, TILE_INPUTS // TILE_PIECE, 2, 4)
    return columns.permute(0, 2, 1, 4, 6, 3, 5).reshape(tiles * TILE_OUTPUTS, blocks * TILE_INPUTS)
