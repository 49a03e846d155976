"""Codes of 4 and 8 bits become bfloat16 or float16 by their bits, several at a time, in PTX.

Each text takes elements of a register or two, and gives those of the same places: a tensor's order in registers is
Triton's own. Triton's interpreter has no PTX, and other types none either: they go without (``""``).
"""

# 128 + c is 0x4300 | c in bfloat16, and 1024 + c is 0x6400 | c in float16: what is above 128 or 1024 is taken away.

from __future__ import annotations

import os
import struct

import torch

from compiled_llm_ops.packed.formats import NF4

_HALVES = ("0x4140", "0x4342")
"""Selectors of ``prmt`` that put bytes 0 and 1, or 2 and 3, into the low bytes of two halves."""


def text_for(code: str, layout: str, dtype: torch.dtype) -> str:
    """Return the PTX that unpacks such codes; empty if there is none."""
    if os.environ.get("TRITON_INTERPRET") == "1" or dtype is not torch.bfloat16:
        return ""
    if layout in ("rows", "high_first"):
        if code == "nf4":
            return nf4_halves()
        if code in ("int4", "uint4"):
            return int4_halves(code)
        return int8_numbers(code) if code in ("int8", "uint8") else ""
    return int4_planes(code) if code in ("int4", "uint4") else ""


def int4_halves(code: str) -> str:
    """Four bytes become four low codes ($0, $1) and four high ones ($2, $3), 8 less each."""
    bits = _bits_of_int4(code)
    return "\n".join(
        [
            "{ .reg .b32 a, b, m;",
            "mov.b32 m, 0x43084308;",
            f"prmt.b32 a, $4, 0, {_HALVES[0]}; prmt.b32 b, $4, 0, {_HALVES[1]};",
            f"lop3.b32 $0, a, 0x000F000F, {bits}, 0x6A; lop3.b32 $1, b, 0x000F000F, {bits}, 0x6A;",
            "shr.u32 a, a, 4; shr.u32 b, b, 4;",
            f"lop3.b32 $2, a, 0x000F000F, {bits}, 0x6A; lop3.b32 $3, b, 0x000F000F, {bits}, 0x6A;",
            *(f"sub.rn.bf16x2 ${i}, ${i}, m;" for i in range(4)),
            "}",
        ]
    )


def int4_planes(code: str) -> str:
    """Two words ($8, $9) become eight planes of two codes, the lowest bits first, 8 less each."""
    bits = _bits_of_int4(code)
    lines = ["{ .reg .b32 a, b, s, m;", "mov.b32 m, 0x43084308;"]
    lines += ["prmt.b32 a, $8, $9, 0x5410; prmt.b32 b, $8, $9, 0x7632;"]
    for half, register in enumerate("ab"):
        for plane in range(4):
            lines += [
                f"shr.u32 s, {register}, {4 * plane};",
                f"lop3.b32 ${4 * half + plane}, s, 0x000F000F, {bits}, 0x6A;",
            ]
    lines += [f"sub.rn.bf16x2 ${i}, ${i}, m;" for i in range(8)]
    return "\n".join([*lines, "}"])


def _bits_of_int4(code: str) -> str:
    """Return the bits of 128 in two halves, with the sign of two's complement turned round."""
    return "0x43004300" if code == "uint4" else "0x43084308"


def int8_numbers(code: str) -> str:
    """Four bytes become four numbers ($0, $1), unsigned ones 128 less."""
    # The lowest 7 bits above 128, minus 128, or minus 256 if the number is negative.
    sign = "0x43004300" if code == "int8" else "0x43804380"
    lines = ["{ .reg .b32 a, b, t, u;"]
    lines += [f"prmt.b32 a, $2, 0, {_HALVES[0]}; prmt.b32 b, $2, 0, {_HALVES[1]};"]
    for half, register in enumerate("ab"):
        lines += [
            f"lop3.b32 t, {register}, 0x007F007F, 0x43004300, 0xEA;",
            f"lop3.b32 u, {register}, 0x00800080, {sign}, 0x6A;",
            f"sub.rn.bf16x2 ${half}, t, u;",
        ]
    return "\n".join([*lines, "}"])


def nf4_halves() -> str:
    """Four bytes become entries of NF4's table: four of the low codes ($0, $1) and four of the high ones ($2, $3)."""
    # ``prmt`` looks four codes up at a time, among eight bytes by three bits of each code. The fourth bit chooses
    # between the lower and the upper half of the table: moved to the sign of a byte, it becomes a mask.
    bits = [struct.pack("<f", value) for value in torch.tensor(NF4).bfloat16().tolist()]
    tables = {name: [entry[byte] for entry in bits] for name, byte in (("l", 2), ("h", 3))}
    words = {
        f"{name}{i}": int.from_bytes(bytes(table[4 * i : 4 * i + 4]), "little")
        for name, table in tables.items()
        for i in range(4)
    }
    lines = ["{ .reg .b32 x, s, m, l, h, t;", f".reg .b32 {', '.join(words)};"]
    lines += [f"mov.b32 {name}, 0x{word:08X};" for name, word in words.items()]
    lines += ["shl.b32 x, $4, 4; and.b32 s, $4, 0x77777777;"]
    for half, signs in enumerate(("0xD9C8", "0xFBEA")):
        lines += ["shr.u32 s, s, 16;"] if half else []
        lines += [f"prmt.b32 m, x, $4, {signs};"]
        for name in "lh":
            lines += [
                f"prmt.b32 {name}, {name}0, {name}1, s; prmt.b32 t, {name}2, {name}3, s;",
                f"lop3.b32 {name}, t, m, {name}, 0xE2;",
            ]
        lines += [f"prmt.b32 ${half}, l, h, 0x6240; prmt.b32 ${2 + half}, l, h, 0x7351;"]
    return "\n".join([*lines, "}"])
