"""Codes become pairs of neighbouring numbers by their bits, in PTX; as in ``ptx``, which explains how."""

from __future__ import annotations

import torch

from compiled_llm_ops.packed.formats import NF4, NF4_UNIT
from compiled_llm_ops.packed.kernels.ptx import NUMBERS, bits_of, bits_of_int4, interprets, looked_up, twice

_FMA = {torch.bfloat16: "fma.rn.bf16x2", torch.float16: "fma.rn.f16x2"}


def pair_text_for(code: str, layout: str, dtype: torch.dtype, *, scaled: bool = False) -> str:
    """Return the PTX that unpacks such codes, ``scaled`` if it multiplies and adds as well; empty if there is none."""
    if interprets() or dtype not in NUMBERS or (code == "e4m3" and dtype is torch.float16):
        return ""
    if code == "nf4":
        return _nf4(layout == "high_first", dtype)
    if code in ("int8", "uint8", "e4m3"):
        return _e4m3() if code == "e4m3" else _int8(code, dtype)
    if layout == "tiles":
        return _tile(code, dtype, scaled)
    if layout == "words_by_output":
        return _word(code, dtype, scaled)
    return _byte(code, dtype, layout == "high_first", scaled)


def _ended(value: str, code: str, dtype: torch.dtype, minus: str, factors: tuple[str, str] | None) -> list[str]:
    """Return what makes two numbers of two codes, in the lowest bits of halves."""
    lines = [
        f"lop3.b32 {value}, {value}, 0x000F000F, {bits_of_int4(code, dtype)[0]}, 0x6A;",
        f"{NUMBERS[dtype].minus} {value}, {value}, {minus};",
    ]
    return lines if factors is None else [*lines, f"{_FMA[dtype]} {value}, {value}, {factors[0]}, {factors[1]};"]


def _byte(code: str, dtype: torch.dtype, high_first: bool, scaled: bool) -> str:
    """A byte ($2) becomes two numbers ($0, $1), $3 less, times $4 and plus $5 if ``scaled``."""
    apart = "shr.u32 t, $2, 4; mad.lo.u32 y, $2, 65536, t;" if high_first else "mad.lo.u32 y, $2, 4097, 0;"
    ended = _ended("y", code, dtype, "$3", ("$4", "$5") if scaled else None)
    return "\n".join(["{ .reg .b32 t, y;", apart, *ended, "mov.b32 {$0, $1}, y;", "}"])


def _word(code: str, dtype: torch.dtype, scaled: bool) -> str:
    """A place of two words ($2, $3) becomes two numbers ($0, $1): halves by a selector ($4), moved by $5; $6 less."""
    ended = _ended("y", code, dtype, "$6", ("$7", "$8") if scaled else None)
    lines = ["{ .reg .b32 y;", "prmt.b32 y, $2, $3, $4; shr.u32 y, y, $5;", *ended, "mov.b32 {$0, $1}, y;", "}"]
    return "\n".join(lines)


def _tile(code: str, dtype: torch.dtype, scaled: bool) -> str:
    """A word ($8) becomes eight numbers, $9 less: a place and the one after the next three are neighbours."""
    lines = ["{ .reg .b32 y;"]
    for eighth in range(4):
        lines += [f"shr.u32 y, $8, {4 * eighth};" if eighth else "mov.b32 y, $8;"]
        lines += _ended("y", code, dtype, "$9", ("$10", "$11") if scaled else None)
        lines += [f"mov.b32 {{${eighth}, ${4 + eighth}}}, y;"]
    return "\n".join([*lines, "}"])


def _int8(code: str, dtype: torch.dtype) -> str:
    """Two bytes ($1) become two numbers ($0), unsigned ones 128 less."""
    number = NUMBERS[dtype]
    lines = ["{ .reg .b32 a, t, u;", "cvt.u32.u16 a, $1; prmt.b32 a, a, 0, 0x4140;"]
    if dtype is torch.float16:
        joined = twice(number.one | (128 if code == "int8" else 0))
        lines += [f"mov.b32 u, {twice(number.one | 128)};", f"lop3.b32 t, a, 0x00FF00FF, {joined}, 0x6A;"]
    else:
        # The lowest 7 bits above 128, minus 128, or minus 256 if the number is negative
        sign = twice(number.one | (0 if code == "int8" else 128))
        lines += [f"lop3.b32 t, a, 0x007F007F, {twice(number.one)}, 0xEA;"]
        lines += [f"lop3.b32 u, a, 0x00800080, {sign}, 0x6A;"]
    return "\n".join([*lines, f"{number.minus} $0, t, u;", "}"])


def _e4m3() -> str:
    """Two bytes ($1) become two numbers of bfloat16 ($0); codes that are not numbers become 480."""
    return "\n".join(
        [
            "{ .reg .b32 a, t, m;",
            "mov.b32 m, 0x7B807B80; cvt.u32.u16 a, $1; prmt.b32 a, a, 0, 0x1404;",
            "shr.u32 t, a, 4; and.b32 t, t, 0x07F007F0;",
            "lop3.b32 t, a, 0x80008000, t, 0xEA;",
            "mul.rn.bf16x2 $0, t, m;",
            "}",
        ]
    )


def _nf4(high_first: bool, dtype: torch.dtype) -> str:
    """Four bytes ($4) become the first numbers of each ($0, $1) and the second ones ($2, $3), scaled.

    A byte's scale is a sum ($5 to $8, and $9 to $12), both as halves of a word.
    """
    pairs = ("0x4051", "0x6273") if high_first else ("0x5140", "0x7362")
    table = [bits_of(value * NF4_UNIT, dtype) for value in NF4]
    lines = ["{ .reg .b32 y<4>, z<4>; .reg .b16 f<4>, g<4>;"]
    lines += looked_up("$4", table, [("y0", "y1"), ("y2", "y3")], pairs)
    for i in range(4):
        # The small part of a scale comes first: its product's rounding is as small.
        lines += [f"{NUMBERS[dtype].times} z{i}, y{i}, ${9 + i};", f"{_FMA[dtype]} y{i}, y{i}, ${5 + i}, z{i};"]
        lines += [f"mov.b32 {{f{i}, g{i}}}, y{i};"]
    lines += ["mov.b32 $0, {f0, f1}; mov.b32 $1, {f2, f3}; mov.b32 $2, {g0, g1}; mov.b32 $3, {g2, g3};", "}"]
    return "\n".join(lines)
