"""PTX that turns codes into numbers, run by what its instructions are documented to do: every code, every place."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import pytest
import torch

from compiled_llm_ops.packed.formats import NF4
from compiled_llm_ops.packed.kernels import ptx

WORD = 0xFFFFFFFF


def number(half: int) -> float:
    """The bfloat16 of 16 bits."""
    return float(struct.unpack("<f", struct.pack("<I", half << 16))[0])


def bits(value: float) -> int:
    """16 bits of a number that bfloat16 has."""
    whole = int(struct.unpack("<I", struct.pack("<f", value))[0])
    assert whole & 0xFFFF == 0, f"{value} is rounded"
    return whole >> 16


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


def minus(a: int, b: int) -> int:
    """The differences of two pairs of bfloat16."""
    parts = [number(a >> shift & 0xFFFF) - number(b >> shift & 0xFFFF) for shift in (0, 16)]
    return bits(parts[0]) | bits(parts[1]) << 16


INSTRUCTIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "sub.rn.bf16x2": minus,
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


def numbers(registers: dict[str, int], *names: str) -> list[float]:
    return [number(registers[name] >> shift & 0xFFFF) for name in names for shift in (0, 16)]


MEANING: dict[str, Callable[[int], float]] = {
    "uint4": lambda code: code - 8,
    "int4": lambda code: code - 16 * (code > 7),
    "nf4": lambda code: float(torch.tensor(NF4[code]).bfloat16()),
    "uint8": lambda code: code - 128,
    "int8": lambda code: code - 256 * (code > 127),
}


@pytest.mark.parametrize("code", ["uint4", "int4", "nf4"])
def test_halves_of_bytes(code: str) -> None:
    text, mean = ptx.nf4_halves() if code == "nf4" else ptx.int4_halves(code), MEANING[code]
    for byte in range(256):
        for place in range(4):
            others = [(byte * 7 + 31 * i) % 256 for i in range(4)]
            others[place] = byte
            found = run(text, {"$4": int.from_bytes(bytes(others), "little")})
            assert numbers(found, "$0", "$1") == [mean(one & 15) for one in others]
            assert numbers(found, "$2", "$3") == [mean(one >> 4) for one in others]


@pytest.mark.parametrize("code", ["uint8", "int8"])
def test_bytes(code: str) -> None:
    for byte in range(256):
        own = [byte, (byte + 85) % 256, 255 - byte, byte ^ 128]
        found = run(ptx.int8_numbers(code), {"$2": int.from_bytes(bytes(own), "little")})
        assert numbers(found, "$0", "$1") == [MEANING[code](one) for one in own]


@pytest.mark.parametrize("code", ["uint4", "int4"])
def test_planes_of_words(code: str, seed: int) -> None:
    for words in torch.randint(2**32, (64, 2)).tolist():
        found = run(ptx.int4_planes(code), {"$8": words[0], "$9": words[1]})
        for plane in range(8):
            assert numbers(found, f"${plane}") == [MEANING[code](word >> 4 * plane & 15) for word in words]
