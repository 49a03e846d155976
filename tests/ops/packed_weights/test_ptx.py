"""PTX that turns codes into numbers, run by what its instructions are documented to do: every code, every place."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable

import pytest
import torch

from compiled_llm_ops.packed.formats import NF4
from compiled_llm_ops.packed.kernels import ptx

WORD = 0xFFFFFFFF


DTYPES = [torch.bfloat16, torch.float16]


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


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "sub.rn.bf16x2": of_pairs(operator.sub, torch.bfloat16),
    "sub.rn.f16x2": of_pairs(operator.sub, torch.float16),
    "mul.rn.bf16x2": of_pairs(operator.mul, torch.bfloat16),
    "shr.u32": lambda a, by: a >> by,
    "shl.b32": lambda a, by: a << by & WORD,
    "and.b32": lambda a, b: a & b,
}


def run(text: str, inputs: dict[str, int]) -> dict[str, int]:
    """Registers after the text, with those that it was given, which it may not write."""
    registers = dict(inputs)
    for line in re.split(r"[;{}\n]+", text):
        name, _, operands = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        target, *others = [operand.strip() for operand in operands.split(",")]
        values = [int(one, 0) if one[0].isdigit() else registers[one] for one in others]
        assert target not in inputs
        registers[target] = INSTRUCTIONS[name](*values)
    return registers


def numbers(registers: dict[str, int], dtype: torch.dtype, *names: str) -> list[float]:
    return [number(registers[name] >> shift & 0xFFFF, dtype) for name in names for shift in (0, 16)]


MEANING: dict[str, Callable[[int], float]] = {
    "uint4": lambda code: code - 8,
    "int4": lambda code: code - 16 * (code > 7),
    "uint8": lambda code: code - 128,
    "int8": lambda code: code - 256 * (code > 127),
    "e4m3": lambda code: float(torch.tensor(code).to(torch.uint8).view(torch.float8_e4m3fn)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", ["uint4", "int4", "nf4"])
def test_halves_of_bytes(code: str, dtype: torch.dtype) -> None:
    text = ptx.text_for(code, "rows", dtype)
    values = torch.tensor(NF4).to(dtype).tolist() if code == "nf4" else list(map(MEANING[code], range(16)))
    for byte in range(256):
        own = [byte, (byte + 85) % 256, 255 - byte, byte * 7 % 256]
        found = run(text, {"$4": int.from_bytes(bytes(own), "little")})
        assert numbers(found, dtype, "$0", "$1") == [values[one & 15] for one in own]
        assert numbers(found, dtype, "$2", "$3") == [values[one >> 4] for one in own]


def test_nf4_in_float32() -> None:
    upper, lower = ptx.exact_nf4()
    for byte in range(256):
        given = {"$4": byte << 16}
        high, low = run(upper, given), run(lower, given)
        for place, code in (("$1", byte & 15), ("$3", byte >> 4)):
            bits = (high[place] & 0xFFFF) << 16 | low[place] & 0xFFFF
            assert torch.tensor(bits, dtype=torch.uint32).view(torch.float32) == torch.tensor(NF4[code])


@pytest.mark.parametrize(("code", "dtype"), [*itertools.product(["uint8", "int8"], DTYPES), ("e4m3", torch.bfloat16)])
def test_bytes(code: str, dtype: torch.dtype) -> None:
    text = ptx.text_for(code, "rows", dtype)
    for byte in range(256):
        own = [byte, (byte + 85) % 256, 255 - byte, byte ^ 128]
        if code == "e4m3":  # without those that are not numbers
            own = [one - (one & 127 == 127) for one in own]
        found = run(text, {"$2": int.from_bytes(bytes(own), "little")})
        assert numbers(found, dtype, "$0", "$1") == list(map(MEANING[code], own))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", ["uint4", "int4"])
def test_planes_of_words(code: str, dtype: torch.dtype, seed: int) -> None:
    for words in torch.randint(2**32, (64, 2)).tolist():
        found = run(ptx.text_for(code, "tiles", dtype), {"$8": words[0], "$9": words[1]})
        for plane in range(8):
            assert numbers(found, dtype, f"${plane}") == [MEANING[code](word >> 4 * plane & 15) for word in words]
