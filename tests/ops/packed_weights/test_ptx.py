"""PTX that turns codes into numbers, run by what its instructions are documented to do: every code, every place."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from compiled_llm_ops.packed.formats import NF4, NF4_UNIT
from compiled_llm_ops.packed.kernels import ptx
from compiled_llm_ops.packed.kernels.pair_ptx import pair_text_for
from support.ops.running_ptx import numbers, run

DTYPES = [torch.bfloat16, torch.float16]

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


# ---- pairs of neighbours

ONE = {torch.bfloat16: 0x4300, torch.float16: 0x6400}


def twice(half: int) -> int:
    return half << 16 | half


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["rows", "high_first", "words_by_input"])
@pytest.mark.parametrize("code", ["uint4", "int4"])
def test_pairs_of_bytes(code: str, layout: str, dtype: torch.dtype) -> None:
    text = pair_text_for(code, layout, dtype)
    for byte in range(256):
        found = run(text, {"$2": byte, "$3": twice(ONE[dtype] | 8)})
        low, high = MEANING[code](byte & 15), MEANING[code](byte >> 4)
        assert numbers(found, dtype, "$0", "$1")[::2] == ([high, low] if layout == "high_first" else [low, high])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["rows", "high_first"])
def test_pairs_of_nf4_are_scaled_and_rounded_once(layout: str, dtype: torch.dtype, seed: int) -> None:
    text = pair_text_for("nf4", layout, dtype)
    values = (torch.tensor(NF4).double() * NF4_UNIT).to(dtype).double()
    for byte in range(256):
        own = torch.tensor([byte, (byte + 85) % 256, 255 - byte, byte * 7 % 256])
        scales = torch.rand(4).add(0.01)
        large = scales.to(dtype)
        small = (scales - large.float()).to(dtype)
        halves = [twice(half) for part in (large, small) for half in part.view(torch.uint16).tolist()]
        given = {f"${5 + place}": half for place, half in enumerate(halves)}
        found = run(text, {"$4": int.from_bytes(bytes(own.tolist()), "little"), **given})
        places = (own >> 4, own & 15) if layout == "high_first" else (own & 15, own >> 4)
        got = torch.tensor(numbers(found, dtype, "$0", "$1", "$2", "$3"), dtype=torch.float64).view(2, 4)
        exact = torch.stack([values[place] * scales.double() for place in places])
        # Half a unit in the last place, and a little for what the small part's product has lost
        assert (got - exact).abs().le(exact.abs() * torch.finfo(dtype).eps * 0.51).all()


def test_nf4_has_its_least_error_in_bfloat16_by_its_unit() -> None:
    """As weights of a normal distribution have codes."""
    weights = torch.randn(1 << 16, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    table = torch.tensor(NF4, dtype=torch.float64)
    bounds = (table[1:] + table[:-1]) / 2
    share = torch.bincount(torch.bucketize(weights / weights.abs().amax(1, keepdim=True), bounds).flatten()).double()

    def error(unit: float) -> float:
        rounded = (table * unit).bfloat16().double() / unit
        return float(((share * (rounded - table) ** 2).sum() / (share * table**2).sum()).sqrt())

    assert error(NF4_UNIT) < 0.6 * error(1.0)
    assert error(NF4_UNIT) < 1.01 * min(error(1 + step / 2000) for step in range(2000))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairs_less_zeros_scaled(dtype: torch.dtype) -> None:
    """Zeros of integers are exact; a scale and a zero of the rows' type are rounded once."""
    plain, scaled = (pair_text_for("uint4", "rows", dtype, scaled=scaled) for scaled in (False, True))
    factor, shift = (int(torch.tensor(one).to(dtype).view(torch.uint16)) for one in (0.37, -1.3))
    for zero in range(17):
        found = run(plain, {"$2": 0xC5, "$3": twice(ONE[dtype] + zero)})
        assert numbers(found, dtype, "$0", "$1")[::2] == [5 - zero, 12 - zero]
    given = {"$2": 0xC5, "$3": twice(ONE[dtype] | 8), "$4": twice(factor), "$5": twice(shift)}
    expected = (torch.tensor([-3.0, 4.0]) * torch.tensor(0.37).to(dtype) + torch.tensor(-1.3).to(dtype)).to(dtype)
    assert numbers(run(scaled, given), dtype, "$0", "$1")[::2] == expected.tolist()


@pytest.mark.parametrize(("code", "dtype"), [*itertools.product(["uint8", "int8"], DTYPES), ("e4m3", torch.bfloat16)])
def test_pairs_of_8_bits(code: str, dtype: torch.dtype) -> None:
    text = pair_text_for(code, "rows", dtype)
    for byte in range(256):
        own = [byte, 255 - byte]
        if code == "e4m3":  # without those that are not numbers
            own = [one - (one & 127 == 127) for one in own]
        found = run(text, {"$1": own[0] | own[1] << 8})
        assert numbers(found, dtype, "$0") == list(map(MEANING[code], own))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("code", ["uint4", "int4"])
def test_pairs_of_words(code: str, dtype: torch.dtype, seed: int) -> None:
    minus = twice(ONE[dtype] | 8)
    for first, second in torch.randint(2**32, (64, 2)).tolist():
        for place in range(8):
            given = {"$2": first, "$3": second, "$4": 0x5410 if place < 4 else 0x7632, "$5": 4 * (place % 4)}
            found = run(pair_text_for(code, "words_by_output", dtype), given | {"$6": minus})
            expected = [MEANING[code](word >> 4 * place & 15) for word in (first, second)]
            assert numbers(found, dtype, "$0", "$1")[::2] == expected
        found = run(pair_text_for(code, "tiles", dtype), {"$8": first, "$9": minus})
        expected = [MEANING[code](first >> 4 * place & 15) for place in range(8)]
        assert numbers(found, dtype, *(f"${place}" for place in range(8)))[::2] == expected
