"""Matmuls with weights of 4 and 8 bits: `packed/rule.py` of the ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.packed.formats import NESTED_BLOCK, NESTED_CODES, PackedFormat, PackedWeight
from compiled_llm_ops.packed.rule import MAX_BLOCK, Choice, Library, can_be_rounded, choose, splits_for
from compiled_llm_ops.packed.tilings import (
    FewRowsTiling,
    PackedLinearTiling,
    RoundedTiling,
    block_inputs,
    can_be_apart,
    can_be_joined,
    joined_inputs,
    takes_few_rows,
)
from fitting.cases import Case, Machine, case_of
from fitting.measuring import LARGER_THAN_CACHES, LAUNCHES, captured

PRODUCTS = {"qkv": (6144, 4096), "gate, up": (24576, 4096), "down": (4096, 12288)}
"""`(N, K)` of a layer of Qwen3-8B."""

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)

FORMATS = {
    "int4": PackedFormat("uint4", "rows", 1, 128),
    "fp8": PackedFormat("e4m3", "rows", 128, 128, may_round=True),
    "int8": PackedFormat("int8"),
    "nf4": PackedFormat("nf4", "high_first", 1, 64),
    "nf4-nested": PackedFormat("nf4", "high_first", 1, 64),
    "gptq": PackedFormat("uint4", "words_by_input", 1, 128),
    "awq": PackedFormat("uint4", "words_by_output", 1, 128),
    "tiles": PackedFormat("uint4", "tiles", 1, 128),
    "int4-g32": PackedFormat("uint4", "rows", 1, 32),
    "gptq-g32": PackedFormat("uint4", "words_by_input", 1, 32),
    "awq-g32": PackedFormat("uint4", "words_by_output", 1, 32),
    "tiles-g32": PackedFormat("uint4", "tiles", 1, 32),
    "int4-g64": PackedFormat("uint4", "rows", 1, 64),
    "gptq-g64": PackedFormat("uint4", "words_by_input", 1, 64),
    "awq-g64": PackedFormat("uint4", "words_by_output", 1, 64),
}
"""Formats as libraries leave them, symmetric but for GPTQ, AWQ and torchao's tiles; of some, short groups as well."""


class Cut(NamedTuple):
    """How a kernel on tensor cores is compiled."""

    rows: int
    outputs: int
    stages: int
    warps: int
    way: str = ""  # "apart" or "joined", as in a tiling
    inputs: int = MAX_BLOCK  # that a program multiplies at a time, at most

    def __str__(self) -> str:
        return f"{self.way or 'ordered'} {self.rows}x{self.outputs}x{self.inputs} s{self.stages} w{self.warps}"


def packed_weight(name: str, n: int, k: int, device: torch.device) -> PackedWeight:
    """Return a random weight."""
    format = FORMATS[name]
    if format.code == "e4m3":
        codes = torch.randn(n, k, device=device).mul(16).to(torch.float8_e4m3fn)
        return PackedWeight(format, codes, torch.rand(n // 128, k // 128, device=device) / 512, None, (n, k))
    words = torch.randint(-(2**31), 2**31 - 1, (n * k * format.bits // 32,), device=device, dtype=torch.int32)
    if format.layout in ("rows", "high_first"):
        codes = words.view(torch.int8 if format.code == "int8" else torch.uint8).view(n, -1)
        dtype = torch.float32 if format.code == "nf4" else torch.bfloat16
        scales = torch.rand(n, k // format.inputs if format.inputs else 1, device=device, dtype=dtype) / 64
        weight = PackedWeight(format, codes, scales, None, (n, k))
        return _nested(weight) if name == "nf4-nested" else weight
    groups = k // format.inputs
    if format.layout == "tiles":
        both = torch.rand(groups, n, 2, device=device, dtype=torch.bfloat16) / 64
        codes = words.view(n // 8, k // 128, 32, 4)
        return PackedWeight(format, codes, both[..., 0].t(), both[..., 1].t(), (n, k))
    codes = words.view(k // 8, n) if format.layout == "words_by_input" else words.view(k, n // 8)
    scales = torch.rand(groups, n, device=device, dtype=torch.bfloat16).t() / 64
    return PackedWeight(format, codes, scales, torch.randint(16, (groups, n), device=device).byte().t(), (n, k))


def _nested(weight: PackedWeight) -> PackedWeight:
    """Return a weight with random scales of 8 bits."""
    codes = torch.randint(NESTED_CODES, weight.scales.shape, device=weight.scales.device, dtype=torch.uint8)
    count = NESTED_CODES + 1 + -(-codes.numel() // NESTED_BLOCK)
    return weight._replace(scales=codes, nested=torch.rand(count, device=codes.device) / 64)


def cuts(m: int, weight: PackedWeight, quick: bool) -> list[Cut]:
    """Return how kernels for so many rows could be compiled."""
    found: list[Cut] = []
    inputs = block_inputs(weight.format, MAX_BLOCK)
    if weight.format.code == "nf4":
        found += [one for one in JOINED_NF4 if one.rows == _tile_rows(m, 8, 256)]
    elif 0 < weight.format.inputs < joined_inputs(weight, torch.bfloat16, MAX_BLOCK):
        sizes = (128,) if weight.format.layout == "tiles" else (64, 128, 256)
        found += [one for one in JOINED_GROUPS if one.rows == _tile_rows(m) and one.inputs in sizes]
    elif can_be_joined(weight, torch.bfloat16):
        found += [one for one in JOINED if one.rows == _tile_rows(m)]
        if m > 64:
            found += [one for one in JOINED if one.rows == 64 and one.outputs >= 128]
    if inputs:
        way = "apart" if can_be_apart(weight.format, inputs) else ""
        rows = max(16 if weight.format.layout in ("tiles", "words_by_output") else 8, 1 << (m - 1).bit_length())
        found += [one._replace(way=way) for one in BESIDE if one.rows == rows]
    return found[:: 2 if quick else 1]


def _tile_rows(m: int, fewest: int = 16, most: int = 128) -> int:
    """Return the rows of the smallest tile that has M, if there is one."""
    return max(fewest, min(most, 1 << (m - 1).bit_length()))


JOINED = [
    *(Cut(16, outputs, stages, 4, "joined") for outputs, stages in ((64, 3), (64, 4), (64, 6), (128, 3), (128, 4))),
    *(Cut(32, outputs, stages, 4, "joined") for outputs, stages in ((64, 3), (64, 4), (64, 6), (128, 3), (128, 4))),
    *(Cut(64, outputs, stages, 4, "joined") for outputs, stages in ((64, 3), (64, 4), (128, 4))),
    *(Cut(rows, 256, 4, 8, "joined") for rows in (32, 64)),
    *(Cut(128, outputs, stages, 4, "joined") for outputs, stages in ((64, 2), (64, 3), (64, 4), (128, 3))),
    *(Cut(128, outputs, 3, 8, "joined") for outputs in (64, 128, 256)),
]
JOINED_NF4 = [
    Cut(rows, outputs, stages, 4, "joined", inputs)
    for rows in (8, 16, 32, 64, 128, 256)
    for inputs, stages in ((64, 3), (64, 4), (128, 2), (128, 3), (256, 2), (256, 3))
    for outputs in ((64, 128) if rows <= 128 else (64,))
    if rows * inputs * stages <= 128 * 384
]
JOINED_GROUPS = [
    Cut(rows, outputs, stages, 4, "joined", inputs)
    for rows in (16, 32, 64, 128)
    for inputs, stages in ((64, 4), (128, 2), (128, 3), (256, 2))
    for outputs in (64, 128)
    if rows * inputs * stages <= 128 * 384
]
BESIDE = [
    *(Cut(8, outputs, 4, warps) for outputs, warps in ((64, 4), (64, 2), (32, 2))),
    *(Cut(16, outputs, 4, 2) for outputs in (32, 64)),
    *(Cut(32, 64, 4, warps) for warps in (2, 4)),
]


ROUNDED = {
    16: ((64, 5, 4), (64, 6, 4), (64, 8, 4), (128, 4, 4)),
    32: ((64, 5, 4), (64, 6, 4), (128, 4, 4)),
    64: ((64, 3, 4), (64, 4, 4), (128, 3, 4), (128, 4, 4), (128, 4, 8)),
    128: ((64, 3, 4), (64, 4, 4), (64, 4, 8), (128, 4, 8)),
}
"""Outputs, stages and warps, by rows of a tile."""


def tilings(cut: Cut, m: int, weight: PackedWeight, processors: int) -> list[PackedLinearTiling]:
    """Return a cut with each number of splits that gives about as many programs as may run at a time."""
    (n, k), joined = weight.shape, cut.way == "joined"
    inputs = joined_inputs(weight, torch.bfloat16, cut.inputs) if joined else block_inputs(weight.format, cut.inputs)
    tiles, steps = -(-m // cut.rows) * -(-n // cut.outputs), -(-k // min(inputs, MAX_BLOCK))
    return [
        PackedLinearTiling(cut.rows, cut.outputs, inputs, cut.stages, one, cut.warps, cut.way == "apart", joined)
        for one in _each_split(tiles, steps, processors)
    ]


def _each_split(tiles: int, steps: int, processors: int) -> list[int]:
    """Return among how many programs a tile's inputs may be split."""
    return sorted({splits_for(each * processors, tiles, steps) for each in (1, 2, 3, 4, 6)})


def candidates(m: int, weight: PackedWeight, processors: int, quick: bool) -> Iterator[Choice]:
    """Yield what could multiply so many rows."""
    if m <= 1024:
        for cut in cuts(m, weight, quick):
            yield from tilings(cut, m, weight, processors)
    if m == 1 and takes_few_rows(weight.format):
        for outputs, inputs, prefetched in itertools.product((4, 8), (512, 1024), (2, 4)):
            yield FewRowsTiling(outputs, inputs, prefetched, 4)
    if can_be_rounded(weight):
        yield from rounded_tilings(m, weight, processors)
        if m >= 8:
            yield Library.ROUNDED
    if m > 64:
        yield Library.UNPACKED


def rounded_tilings(m: int, weight: PackedWeight, processors: int) -> list[RoundedTiling]:
    """Return how products of rows that are rounded could be cut up."""
    n, k = weight.shape
    sizes = (64, 128) if m > 64 else (_tile_rows(m),)
    return [
        RoundedTiling(rows, outputs, stages, one, warps)
        for rows in sizes
        for outputs, stages, warps in ROUNDED[rows]
        for one in _each_split(-(-m // rows) * (n // outputs), k // MAX_BLOCK, processors)
    ]


def copies_of_weight(weight: PackedWeight) -> list[PackedWeight]:
    """Return as many weights like this one as no cache holds."""
    size = weight.codes.nbytes
    copies = (weight._replace(codes=weight.codes.clone()) for _ in range(min(LAUNCHES, LARGER_THAN_CACHES // size)))
    return [weight, *copies]


def launch(rows: Tensor, weight: PackedWeight, choice: Choice, *, pdl: bool = True) -> Tensor:
    """Multiply as chosen."""
    from compiled_llm_ops.packed.kernels.launching import multiply_as

    return multiply_as(choice, rows, weight, None, pdl=pdl)


def packed_timer(name: str, m: int, n: int, k: int) -> Callable[[Choice], float]:
    device = torch.device("cuda")
    weights = copies_of_weight(packed_weight(name, n, k, device))
    rows = torch.randn(m, k, device=device, dtype=torch.bfloat16) / k**0.5
    return lambda choice: captured(lambda number: launch(rows, weights[number % len(weights)], choice))


def packed_weight_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    for name in FORMATS:
        for (product, (n, k)), m in itertools.product(PRODUCTS.items(), ROWS[:: 2 if quick else 1]):
            weight = packed_weight(name, n, k, torch.device("meta"))
            choices = list(candidates(m, weight, machine.processors, quick))
            chosen = choose(m, weight, torch.bfloat16, machine.processors)
            prepare = lambda name=name, m=m, n=n, k=k: packed_timer(name, m, n, k)  # noqa: E731
            yield case_of("packed", f"{name} {product}, M={m}", choices, chosen, prepare)
