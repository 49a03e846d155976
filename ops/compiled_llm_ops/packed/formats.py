"""How a weight of 4 or 8 bits lies in memory, and what its codes stand for."""

# Shapes: N outputs, K inputs.

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of the 16 codes of NF4, in the order of QLoRA (https://arxiv.org/abs/2305.14314) and bitsandbytes."""

NF4_UNIT = 1.43672
"""The factor by which values of NF4 are multiplied before they are rounded to 16 bits; scales are divided by it."""
# In bfloat16 they are 0.08 % off then, by the squares of normal weights, and 0.14 % as they are.

BITS = {"int4": 4, "uint4": 4, "nf4": 4, "int8": 8, "uint8": 8, "e4m3": 8}
"""Bits of a code, by what it is: two's complement, unsigned, an entry of ``NF4``, or a number in e4m3."""

CENTRES = {"uint4": 8, "uint8": 128}
"""The number that is subtracted from an unsigned code if no zeros of integers are given."""

LAYOUTS = ("rows", "high_first", "words_by_input", "words_by_output", "tiles")

WORD_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 outputs each 4 bits of a word stand for, the lowest bits first, in words along the outputs (AWQ)."""

TILE_OUTPUTS, TILE_INPUTS, TILE_PIECE = 8, 128, 32
"""Outputs and inputs of a tile of ``tiles``, and inputs of a piece, which is one word of each of 4 columns."""

NESTED_CODES, NESTED_BLOCK = 256, 256
"""Values of a scale's code, and scales that share a scale, where scales have 8 bits themselves."""

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PackedFormat(NamedTuple):
    """The way a weight ``[N, K]`` is packed.

    Attributes:
        code: what a code is: ``int4`` and ``int8`` two's complement; ``uint4`` and ``uint8`` unsigned, from which 8 or
            128 is taken, or zeros of integers; ``e4m3``, whose codes that are not numbers kernels on CUDA may take for
            480; ``nf4`` an entry of a table.
        layout: where codes lie. ``rows``: ``[N, K]`` or, with 4 bits, ``[N, K / 2]`` bytes, the first of two inputs in
            the low half. ``high_first``: the same with the first in the high half. ``words_by_input``: ``[K / 8, N]``
            int32, the first of 8 inputs in the lowest bits (of 4 with 8 bits), as GPTQ has them. ``words_by_output``:
            ``[K, N / 8]`` int32 in the order ``WORD_OUTPUTS``, as AWQ has them. ``tiles``: ``[N / 8, K / 128, 32, 4]``
            int32, both sizes rounded up, as torch's ``_convert_weight_to_int4pack`` makes them.
        outputs: how many outputs share a scale; 0 for all.
        inputs: how many inputs share a scale; 0 for all.
        may_round: whether a kernel may round activations to e4m3, each row's by 128 inputs, as the library does.
    """

    code: str
    layout: str = "rows"
    outputs: int = 1
    inputs: int = 0
    may_round: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.code]

    def __str__(self) -> str:
        name = {"e4m3": "fp8", "uint4": "int4", "uint8": "int8"}.get(self.code, self.code)
        if self.outputs == 1:
            return f"{name}-g{self.inputs}" if self.inputs else f"{name}-row"
        return f"{name}-block{self.inputs}" if self.inputs else f"{name}-tensor"


class PackedWeight(NamedTuple):
    """A weight as it lies in memory; its tensors may be views of any strides, and the codes are contiguous.

    Attributes:
        format: how it is packed.
        codes: as ``format.layout`` says: int32 for words and tiles, float8_e4m3fn, int8 or uint8 for bytes.
        scales: ``[N / outputs, K / inputs]`` float32, bfloat16 or float16, both sizes rounded up; uint8 if ``nested``.
        zeros: None, or of the scales' shape: integers are taken from an unsigned code before the product with the
            scale, floating-point numbers are added after it.
        shape: N and K.
        nested: None, or ``[257 + b]`` float32: values of the scales' 256 codes, an offset that is added to each scale,
            and a factor for each 256 scales, in the order of the scales.
    """

    format: PackedFormat
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    shape: tuple[int, int]
    nested: Tensor | None = None


def codes_shape(format: PackedFormat, outputs: int, inputs: int) -> tuple[int, ...] | None:
    """Return the shape of the codes of a weight ``[N, K]``, without what tiles add; None if it does not fit."""
    each = 32 // format.bits
    if format.layout in ("rows", "high_first"):
        return None if inputs * format.bits % 8 else (outputs, inputs * format.bits // 8)
    if format.layout == "words_by_input":
        return None if inputs % each else (inputs // each, outputs)
    if format.layout == "words_by_output":
        return None if outputs % each else (inputs, outputs // each)
    return -(-outputs // TILE_OUTPUTS), -(-inputs // TILE_INPUTS), 32, 4


def table_shape(format: PackedFormat, outputs: int, inputs: int) -> tuple[int, int]:
    """Return the shape of the scales of a weight ``[N, K]``."""
    return -(-outputs // (format.outputs or outputs)), -(-inputs // (format.inputs or inputs))


def check_weight(op: str, weight: PackedWeight) -> None:
    """Raise ValueError if a weight's tensors are not what its format says."""
    format, codes, scales, zeros, (outputs, inputs), nested = weight
    _check_format(op, format)
    shape, found = codes_shape(format, outputs, inputs), tuple(codes.shape)
    dtypes = _dtypes_of_codes(format)
    tiled = format.layout == "tiles" and codes.dim() == 4 and found[2:] == (32, 4)
    fits = tiled and shape is not None and found[0] >= shape[0] and found[1] >= shape[1]
    if (not fits and found != shape) or codes.dtype not in dtypes or not codes.is_contiguous():
        raise ValueError(
            f"{op}: codes of {format} in {format.layout!r} must be contiguous {shape} {' or '.join(map(str, dtypes))} "
            f"for [{outputs}, {inputs}]; got {found} {codes.dtype}"
        )
    wanted = table_shape(format, outputs, inputs)
    scaled = (torch.uint8,) if nested is not None else SCALE_DTYPES
    if tuple(scales.shape) != wanted or scales.dtype not in scaled:
        raise ValueError(
            f"{op}: scales of {format} must be {wanted} {' or '.join(map(str, scaled))}; got {tuple(scales.shape)} "
            f"{scales.dtype}"
        )
    if zeros is not None and (tuple(zeros.shape) != wanted or format.code in ("nf4", "e4m3")):
        raise ValueError(f"{op}: zeros must be {wanted}, and None for nf4 and e4m3; got {tuple(zeros.shape)}")
    if zeros is not None and not zeros.is_floating_point() and format.code not in CENTRES:
        raise ValueError(f"{op}: zeros of integers are for unsigned codes; got {zeros.dtype} for {format.code}")
    if nested is not None:
        size = NESTED_CODES + 1 + -(-scales.numel() // NESTED_BLOCK)
        if nested.shape != (size,) or nested.dtype != torch.float32:
            raise ValueError(f"{op}: nested must be [{size}] float32; got {tuple(nested.shape)} {nested.dtype}")


def _check_format(op: str, format: PackedFormat) -> None:
    four_bits = format.layout in ("high_first", "words_by_output", "tiles")
    if format.code not in BITS or format.layout not in LAYOUTS or (four_bits and format.bits != 4):
        raise ValueError(
            f"{op}: code must be one of {', '.join(BITS)} and layout one of {', '.join(LAYOUTS)}, of which all but "
            f"rows and words_by_input have 4 bits; got {format.code!r} in {format.layout!r}"
        )
    if format.outputs < 0 or format.inputs < 0 or (format.code == "e4m3" and format.layout != "rows"):
        raise ValueError(f"{op}: outputs and inputs must be 0 or more, and e4m3 lies in rows; got {tuple(format)}")


def _dtypes_of_codes(format: PackedFormat) -> tuple[torch.dtype, ...]:
    if format.layout not in ("rows", "high_first"):
        return (torch.int32,)
    if format.code == "e4m3":
        return (torch.float8_e4m3fn,)
    return (torch.int8,) if format.code == "int8" else (torch.uint8, torch.int8)
