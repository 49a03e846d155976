"""Codes of 4 and 8 bits become bfloat16 or float16 by their bits, several at a time, in PTX.

Each text takes elements of a register or two, and gives the numbers of the same elements: a tensor's order in registers
is Triton's own. Triton's interpreter has no PTX: there it is empty, as it is for what Triton converts well by itself.
"""

# 128 + c is 0x4300 | c in bfloat16, and 1024 + c is 0x6400 | c in float16: what is too much is taken away.

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from compiled_llm_ops.packed.formats import NF4

_HALVES = ("0x4140", "0x4342")
"""Selectors of ``prmt`` that put bytes 0 and 1, or 2 and 3, into the low bytes of two halves."""


class _Number(NamedTuple):
    """How numbers of a type are made from codes."""

    one: int  # its bits for the number to which a code is added by its own bits
    minus: str  # the instruction that subtracts two pairs
    times: str  # and multiplies them


NUMBERS = {
    torch.bfloat16: _Number(0x4300, "sub.rn.bf16x2", "mul.rn.bf16x2"),
    torch.float16: _Number(0x6400, "sub.rn.f16x2", "mul.rn.f16x2"),
}


def interprets() -> bool:
    """Whether Triton, which who launches kernels has imported, runs them in its interpreter."""
    knobs = sys.modules.get("triton.knobs")
    return knobs is not None and bool(knobs.runtime.interpret)


def text_for(code: str, layout: str, dtype: torch.dtype) -> str:
    """Return the PTX that unpacks such codes; empty if there is none."""
    if interprets() or dtype not in NUMBERS:
        return ""
    if layout not in ("rows", "high_first"):
        return int4_planes(code, dtype) if code in ("int4", "uint4") else ""
    if code in ("int4", "uint4"):
        return int4_halves(code, dtype)
    if code == "nf4":
        return looked_up_halves([bits_of(value, dtype) for value in NF4])
    if code == "e4m3":
        return e4m3_numbers() if dtype is torch.bfloat16 else ""
    return int8_numbers(code, dtype)


def int4_halves(code: str, dtype: torch.dtype) -> str:
    """Four bytes become four low codes ($0, $1) and four high ones ($2, $3), 8 less each."""
    bits, centre = bits_of_int4(code, dtype)
    return "\n".join(
        [
            "{ .reg .b32 a, b, m;",
            f"mov.b32 m, {centre};",
            f"prmt.b32 a, $4, 0, {_HALVES[0]}; prmt.b32 b, $4, 0, {_HALVES[1]};",
            f"lop3.b32 $0, a, 0x000F000F, {bits}, 0x6A; lop3.b32 $1, b, 0x000F000F, {bits}, 0x6A;",
            "shr.u32 a, a, 4; shr.u32 b, b, 4;",
            f"lop3.b32 $2, a, 0x000F000F, {bits}, 0x6A; lop3.b32 $3, b, 0x000F000F, {bits}, 0x6A;",
            *(f"{NUMBERS[dtype].minus} ${i}, ${i}, m;" for i in range(4)),
            "}",
        ]
    )


def int4_planes(code: str, dtype: torch.dtype) -> str:
    """Two words ($8, $9) become eight planes of two codes, the lowest bits first, 8 less each."""
    bits, centre = bits_of_int4(code, dtype)
    lines = ["{ .reg .b32 a, b, s, m;", f"mov.b32 m, {centre};"]
    lines += ["prmt.b32 a, $8, $9, 0x5410; prmt.b32 b, $8, $9, 0x7632;"]
    for half, register in enumerate("ab"):
        for plane in range(4):
            lines += [
                f"shr.u32 s, {register}, {4 * plane};",
                f"lop3.b32 ${4 * half + plane}, s, 0x000F000F, {bits}, 0x6A;",
            ]
    lines += [f"{NUMBERS[dtype].minus} ${i}, ${i}, m;" for i in range(8)]
    return "\n".join([*lines, "}"])


def bits_of_int4(code: str, dtype: torch.dtype) -> tuple[str, str]:
    """Return what codes are joined with, which turns the sign of two's complement round, and what is then too much."""
    one = NUMBERS[dtype].one
    return twice(one if code == "uint4" else one | 8), twice(one | 8)


def twice(half: int) -> str:
    return f"0x{half << 16 | half:08X}"


def int8_numbers(code: str, dtype: torch.dtype) -> str:
    """Four bytes become four numbers ($0, $1), unsigned ones 128 less."""
    number = NUMBERS[dtype]
    lines = ["{ .reg .b32 a, b, t, u;"]
    lines += [f"prmt.b32 a, $2, 0, {_HALVES[0]}; prmt.b32 b, $2, 0, {_HALVES[1]};"]
    if dtype is torch.float16:
        lines += [f"mov.b32 u, {twice(number.one | 128)};"]
    for half, register in enumerate("ab"):
        if dtype is torch.float16:
            joined = twice(number.one | (128 if code == "int8" else 0))
            lines += [f"lop3.b32 t, {register}, 0x00FF00FF, {joined}, 0x6A;"]
        else:
            # The lowest 7 bits above 128, minus 128, or minus 256 if the number is negative
            sign = twice(number.one | (0 if code == "int8" else 128))
            lines += [
                f"lop3.b32 t, {register}, 0x007F007F, {twice(number.one)}, 0xEA;",
                f"lop3.b32 u, {register}, 0x00800080, {sign}, 0x6A;",
            ]
        lines += [f"{number.minus} ${half}, t, u;"]
    return "\n".join([*lines, "}"])


def e4m3_numbers() -> str:
    """Four bytes become four numbers of bfloat16 ($0, $1); codes that are not numbers become 480."""
    # Exponent and fraction go where bfloat16 has them, whose exponents are 120 larger. The conversion that the
    # processor has goes by way of float16, and takes longer than it takes to read a weight.
    lines = ["{ .reg .b32 a, b, t, m;", "mov.b32 m, 0x7B807B80;"]
    lines += ["prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;"]
    for half, register in enumerate("ab"):
        lines += [
            f"shr.u32 t, {register}, 4; and.b32 t, t, 0x07F007F0;",
            f"lop3.b32 t, {register}, 0x80008000, t, 0xEA;",
            f"mul.rn.bf16x2 ${half}, t, m;",
        ]
    return "\n".join([*lines, "}"])


def exact_nf4() -> tuple[str, str]:
    """Return the PTX that looks up the upper and the lower 16 bits of NF4's values in float32; empty without PTX."""
    if interprets():
        return "", ""
    bits = [int.from_bytes(struct.pack("<f", value), "little") for value in NF4]
    return looked_up_halves([one >> 16 for one in bits]), looked_up_halves([one & 0xFFFF for one in bits])


def looked_up_halves(table: Sequence[int]) -> str:
    """Four bytes become 16 bits of a table: four of the low codes ($0, $1) and four of the high ones ($2, $3)."""
    return "\n".join(["{", *looked_up("$4", table, [("$0", "$2"), ("$1", "$3")], ("0x6240", "0x7351")), "}"])


def looked_up(
    given: str, table: Sequence[int], targets: Sequence[tuple[str, str]], selectors: tuple[str, str]
) -> list[str]:
    """Return what looks up the codes of four bytes, two bytes at a time, into two registers each.

    The selectors of ``prmt`` say which of the two bytes' codes come into each: 0 to 3 are lower bytes of the numbers of
    the low and the high code of the first, then of the second byte, and 4 to 7 their higher bytes.
    """
    # ``prmt`` looks four codes up at a time, among eight bytes by three bits of each code. The fourth bit chooses
    # between the lower and the upper half of the table: moved to the sign of a byte, it becomes a mask.
    words = {
        f"{name}{i}": sum((entry >> by & 255) << 8 * place for place, entry in enumerate(table[4 * i : 4 * i + 4]))
        for name, by in (("l", 0), ("h", 8))
        for i in range(4)
    }
    lines = [".reg .b32 x, s, m, l, h, t;", f".reg .b32 {', '.join(words)};"]
    lines += [f"mov.b32 {name}, 0x{word:08X};" for name, word in words.items()]
    lines += [f"shl.b32 x, {given}, 4; and.b32 s, {given}, 0x77777777;"]
    for half, signs in enumerate(("0xD9C8", "0xFBEA")):
        lines += ["shr.u32 s, s, 16;"] if half else []
        lines += [f"prmt.b32 m, x, {given}, {signs};"]
        for name in "lh":
            lines += [
                f"prmt.b32 {name}, {name}0, {name}1, s; prmt.b32 t, {name}2, {name}3, s;",
                f"lop3.b32 {name}, t, m, {name}, 0xE2;",
            ]
        lines += [
            f"prmt.b32 {target}, l, h, {selector};" for target, selector in zip(targets[half], selectors, strict=True)
        ]
    return lines


def bits_of(value: float, dtype: torch.dtype) -> int:
    """Return the 16 bits of a number."""
    return int(torch.tensor(value, device="cpu").to(dtype).view(torch.uint16))
