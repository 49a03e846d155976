"""PTX of a few instructions, run by what these are documented to do."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

import torch

WORD = 0xFFFFFFFF


def number(half: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """The number of 16 bits."""
    return float(torch.tensor(half, dtype=torch.int32).to(torch.uint16).view(dtype))


def bits(value: float, dtype: torch.dtype = torch.bfloat16) -> int:
    """16 bits of a number that the type has."""
    rounded = torch.tensor(value, dtype=torch.float64).to(dtype)
    assert float(rounded) == value, f"{value} is rounded"
    return int(rounded.view(torch.uint16))


def prmt(a: int, b: int, selector: int) -> int:
    """Bytes of two registers by four nibbles, of which the highest bit asks for a byte's sign instead."""
    found = (b << 32 | a).to_bytes(8, "little")
    taken = [(selector >> 4 * place) & 15 for place in range(4)]
    chosen = [(255 if found[one & 7] & 128 else 0) if one & 8 else found[one & 7] for one in taken]
    return int.from_bytes(bytes(chosen), "little")


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Any function of three bits, by its table."""
    out = 0
    for place in range(32):
        index = (a >> place & 1) << 2 | (b >> place & 1) << 1 | (c >> place & 1)
        out |= (table >> index & 1) << place
    return out


def of_pairs(operation: Callable[[float, float], float], dtype: torch.dtype) -> Callable[[int, int], int]:
    """An operation on two pairs of numbers, none of which may be rounded."""

    def both(a: int, b: int) -> int:
        low, high = (operation(number(a >> by & 0xFFFF, dtype), number(b >> by & 0xFFFF, dtype)) for by in (0, 16))
        return bits(low, dtype) | bits(high, dtype) << 16

    return both


def fused(dtype: torch.dtype) -> Callable[[int, int, int], int]:
    """Two products and sums, rounded once."""

    def both(a: int, b: int, c: int) -> int:
        found = 0
        for by in (0, 16):
            first, second, third = (number(one >> by & 0xFFFF, dtype) for one in (a, b, c))
            found |= int(torch.tensor(first * second + third, dtype=torch.float64).to(dtype).view(torch.uint16)) << by
        return found

    return both


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "sub.rn.bf16x2": of_pairs(operator.sub, torch.bfloat16),
    "sub.rn.f16x2": of_pairs(operator.sub, torch.float16),
    "mul.rn.bf16x2": lambda a, b: fused(torch.bfloat16)(a, b, 0),
    "mul.rn.f16x2": lambda a, b: fused(torch.float16)(a, b, 0),
    "fma.rn.bf16x2": fused(torch.bfloat16),
    "fma.rn.f16x2": fused(torch.float16),
    "mad.lo.u32": lambda a, b, c: a * b + c & WORD,
    "cvt.u32.u16": lambda a: a & 0xFFFF,
    "shr.u32": lambda a, by: a >> by,
    "shl.b32": lambda a, by: a << by & WORD,
    "and.b32": lambda a, b: a & b,
}


def run(text: str, inputs: dict[str, int]) -> dict[str, int]:
    """Registers after the text, with those that it was given, which it may not write."""
    registers = dict(inputs)
    for line in re.split(r"[;\n]+", text):
        name, _, operands = line.strip(" {}" if ".reg" in line or "mov" not in line else " ").partition(" ")
        if not name or name in (".reg", "{", "}"):
            continue
        target, *others = [operand.strip() for operand in re.split(r",(?![^{]*})", operands)]
        assert target not in inputs
        if target.startswith("{"):
            for half, part in enumerate(target.strip("{}").split(",")):
                registers[part.strip()] = registers[others[0]] >> 16 * half & 0xFFFF
        elif others[0].startswith("{"):
            low, high = (registers[part.strip()] for part in others[0].strip("{}").split(","))
            registers[target] = low | high << 16
        else:
            values = [int(one, 0) if one[0].isdigit() else registers[one] for one in others]
            registers[target] = INSTRUCTIONS[name](*values)
    return registers


def numbers(registers: dict[str, int], dtype: torch.dtype, *names: str) -> list[float]:
    return [number(registers[name] >> shift & 0xFFFF, dtype) for name in names for shift in (0, 16)]
