"""Packed weights made code by code, as the libraries' documents say, with the values that they stand for in float64.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from compiled_llm_ops.packed.formats import NF4, PackedFormat, PackedWeight, table_shape
from compiled_llm_ops.packed.rule import JoinedTile, joined_of


class Made(NamedTuple):
    """A packed weight, and what it stands for."""

    weight: PackedWeight
    values: Tensor  # ``[N, K]`` float64

    def arguments(self, rows: Tensor, bias: Tensor | None = None) -> tuple[Any, ...]:
        """Those of the op, in their order."""
        (code, layout, *groups, may_round), codes, scales, zeros, shape, nested = self.weight
        return rows, codes, scales, zeros, nested, bias, shape[0], code, layout, *groups, may_round


FORMATS: dict[str, tuple[PackedFormat, str]] = {
    "torchao int4, tiles": (PackedFormat("uint4", "tiles", 1, 128), "added"),
    "torchao int4, plain": (PackedFormat("int4", "rows", 1, 32), "added"),
    "torchao int8": (PackedFormat("int8"), ""),
    "torchao float8 by row": (PackedFormat("e4m3"), ""),
    "torchao float8, one scale": (PackedFormat("e4m3", "rows", 0, 0), ""),
    "FP8Linear": (PackedFormat("e4m3", "rows", 128, 128, may_round=True), ""),
    "bitsandbytes NF4": (PackedFormat("nf4", "high_first", 1, 64), ""),
    "bitsandbytes NF4, nested": (PackedFormat("nf4", "high_first", 1, 64), "nested"),
    "compressed-tensors int4": (PackedFormat("uint4", "rows", 1, 128), ""),
    "compressed-tensors int4, asymmetric": (PackedFormat("uint4", "rows", 1, 32), "taken"),
    "compressed-tensors int4, channel": (PackedFormat("uint4", "rows", 1, 0), ""),
    "compressed-tensors int8, packed": (PackedFormat("uint8", "rows", 1, 64), "taken"),
    "compressed-tensors int8, group": (PackedFormat("int8", "rows", 1, 64), ""),
    "GPTQ": (PackedFormat("uint4", "words_by_input", 1, 128), "taken"),
    "GPTQ, 8 bits": (PackedFormat("uint8", "words_by_input", 1, 32), "taken"),
    "GPTQ, short groups": (PackedFormat("uint4", "words_by_input", 1, 32), "taken"),
    "AWQ": (PackedFormat("uint4", "words_by_output", 1, 64), "taken"),
}
"""What each library has: the format, and whether its zeros are ``taken`` from codes or ``added`` after scaling."""

IN_ROWS = [
    name
    for name, (format, kind) in FORMATS.items()
    if format.layout in ("rows", "high_first") and format.outputs and kind != "nested"
]
"""Formats whose weights can lie side by side, as one for several products."""

ANYWHERE = ["GPTQ", "GPTQ, short groups", "AWQ", "bitsandbytes NF4, nested", "compressed-tensors int4, asymmetric"]
"""Formats of which several weights are one launch wherever they lie: those of words, and some of others."""

LARGEST_E4M3 = 0x7E  # 448; the code after it is not a number


def make(name: str, outputs: int, inputs: int, *, scale: float = 1.0, codes: Tensor | None = None) -> Made:
    """A weight of a library's format from random codes, or from unsigned ``codes`` ``[N, K]``."""
    format, kind = FORMATS[name]
    if codes is None:
        codes = torch.randint(1 << format.bits, (outputs, inputs))
    shape = table_shape(format, outputs, inputs)
    scales = torch.rand(shape).add(0.5).mul(scale)
    if name.startswith(("torchao int4", "GPTQ")):
        scales = scales.t().contiguous().t()  # they have ``[groups, N]``
    zeros = nested = None
    exact = scales.double()
    if kind == "nested":
        table, offset = torch.linspace(-1, 1, 256), torch.tensor([1.5])
        factors = torch.rand(-(-scales.numel() // 256)).add(0.1).mul(scale)
        scales, nested = torch.randint(256, shape, dtype=torch.uint8), torch.cat([table, offset * scale, factors])
        each = factors.double().repeat_interleave(256)[: scales.numel()].view(shape)
        exact = table.double()[scales.int()] * each + nested[256].double()
    if kind == "taken":
        zeros = torch.randint(1 << format.bits, shape, dtype=torch.uint8)
    elif kind == "added":
        zeros = torch.randn(shape) * scale
    rows = torch.arange(outputs)[:, None] // (format.outputs or outputs)
    columns = torch.arange(inputs)[None, :] // (format.inputs or inputs)
    taken = zeros[rows, columns].double() if zeros is not None and kind == "taken" else None
    values = _values(format, codes, taken) * exact[rows, columns]
    if zeros is not None and kind == "added":
        values += zeros[rows, columns].double()
    packed = PackedWeight(format, lay_out(format, codes), scales, zeros, (outputs, inputs), nested)
    return Made(packed, values)


def finite(name: str, outputs: int, inputs: int) -> Made:
    """A weight from random codes, without those of e4m3 that are not numbers."""
    codes = torch.randint(1 << FORMATS[name][0].bits, (outputs, inputs))
    if FORMATS[name][0].code == "e4m3":
        codes = codes.where(codes & 0x7F <= LARGEST_E4M3, 0x3C) & 0xBF  # at most 1.875 in size
    return make(name, outputs, inputs, codes=codes)


def described(name: str, n: int = 4096, k: int = 4096) -> PackedWeight:
    """A weight without numbers, and without zeros."""
    (format, kind), codes = FORMATS[name], torch.empty(0, device="meta")
    dtype = torch.bfloat16 if format.bits == 4 and format.code != "nf4" else torch.float32
    scales = torch.empty(-(-n // (format.outputs or n)), -(-k // (format.inputs or k)), dtype=dtype, device="meta")
    return PackedWeight(format, codes, scales, None, (n, k), codes if kind == "nested" else None)


def tiles_of(name: str) -> tuple[JoinedTile, ...]:
    """Those of the kernel that joins codes, for rows of bfloat16."""
    joined = joined_of(described(name), torch.bfloat16)
    return () if joined is None else joined.tiles


def side_by_side(weights: Sequence[PackedWeight]) -> PackedWeight:
    """One weight of all outputs, as programs have of layers that read one input."""
    first = weights[0]
    scales, zeros = torch.cat([own.scales for own in weights]), None
    if first.zeros is not None:
        zeros = torch.cat([own.zeros for own in weights if own.zeros is not None])
    codes, outputs = torch.cat([own.codes.view(torch.uint8) for own in weights]), sum(own.shape[0] for own in weights)
    return first._replace(
        codes=codes.view(first.codes.dtype), scales=scales, zeros=zeros, shape=(outputs, first.shape[1])
    )


def arguments_together(rows: Tensor, weights: Sequence[PackedWeight], bias: Tensor | None = None) -> tuple[Any, ...]:
    """Those of `packed_linears`, in their order."""
    format = weights[0].format
    required = [own.codes for own in weights], [own.scales for own in weights]
    zeros = [own.zeros for own in weights if own.zeros is not None]
    nested = [own.nested for own in weights if own.nested is not None]
    return rows, *required, zeros, nested, bias, format.code, format.layout, format.inputs


def _values(format: PackedFormat, codes: Tensor, zeros: Tensor | None) -> Tensor:
    if format.code == "nf4":
        return torch.tensor(NF4).double()[codes]
    if format.code == "e4m3":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    half = 1 << (format.bits - 1)
    if format.code in ("int4", "int8"):
        return torch.where(codes < half, codes, codes - 2 * half).double()
    return codes.double() - (half if zeros is None else zeros)


def lay_out(format: PackedFormat, codes: Tensor) -> Tensor:
    """Put unsigned codes ``[N, K]`` where a layout has them, one by one."""
    (outputs, inputs), each = codes.shape, 32 // format.bits
    if format.layout in ("rows", "high_first"):
        if format.bits == 8:
            dtype = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}.get(format.code, torch.uint8)
            return codes.to(torch.uint8).view(dtype)
        first, second = codes[:, ::2], codes[:, 1::2]
        low, high = (first, second) if format.layout == "rows" else (second, first)
        return (low + 16 * high).to(torch.uint8)
    if format.layout == "words_by_input":
        words = torch.zeros(inputs // each, outputs, dtype=torch.int64)
        for k in range(inputs):
            words[k // each] += codes[:, k] << format.bits * (k % each)
    elif format.layout == "words_by_output":
        words = torch.zeros(inputs, outputs // 8, dtype=torch.int64)
        for n in range(outputs):
            words[:, n // 8] += codes[n] << 4 * (0, 4, 1, 5, 2, 6, 3, 7)[n % 8]
    else:
        words = torch.zeros(-(-outputs // 8), -(-inputs // 1024) * 8, 32, 4, dtype=torch.int64)
        padded = pad(codes, (0, -inputs % 1024, 0, -outputs % 8))
        for n in range(8):  # those of all tiles at once
            for k in range(128):
                within = k % 32
                column, nibble = within % 8 // 2, within // 8 + 4 * (within % 2)
                words[:, :, n * 4 + column, k // 32] += padded[n::8, k::128] << 4 * nibble
    return torch.where(words < 2**31, words, words - 2**32).int()
