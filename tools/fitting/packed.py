"""Packed queries of rows, by the backend `"triton"`: `kernels/attention/packed_tiling.py`.

The rule looks at the size of heads, the types, and the queries of a row for one kv head. A name begins with the first
two, so that `--cases "D=128, bfloat16"` is one line of its table: one size with `--quick` compiles 6 to 20 kernels and
takes about a minute, all sizes of 16 bits (`--cases bfloat16`) about four.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from compiled_llm_ops.kernels.attention.packed_tiling import PackedTiling, packed_tiling
from fitting.cases import PAGE_SIZE, Case, Machine, case_of
from fitting.measuring import captured, copies_of

FEWER_HEADS = 256
"""Head sizes from which on models have fewer kv heads."""

FREE = 1024
"""Bytes of shared memory that a program cannot use."""


class Packed(NamedTuple):
    """Rows with as many new tokens each, after as many tokens each."""

    rows: int  # B
    new: int  # tokens of each row
    stored: int  # tokens before those

    def __str__(self) -> str:
        return f"{self.rows} x {self.new} new tokens" + (f" after {self.stored}" if self.stored else "")


LONG, CHUNKS, AFTER, VERIFIED = Packed(1, 4096, 0), Packed(8, 512, 0), Packed(4, 128, 4096), Packed(32, 4, 1000)
"""A prompt, several, ends of rows whose beginning is stored, and drafted tokens: tiles that a row does not fill."""


def packed_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    """Heads of each size, in groups; with float32, which has no tensor cores, in fewer shapes."""
    shapes = [LONG, CHUNKS, AFTER, VERIFIED]
    shapes += [] if quick else [Packed(1, 512, 0), Packed(1, 128, 0), Packed(1, 1024, 32_768), Packed(64, 16, 600)]
    for dim, dtype in itertools.product((64, 128, 256, 512), (torch.bfloat16, torch.float32)):
        exact = dtype == torch.float32
        if quick and exact and dim != 128:
            continue
        of_heads = packed_tilings(machine, dim, dtype.itemsize, quick)
        for group in (4,) if quick else (1, 4, 7):
            for shape in (Packed(1, 512, 0), VERIFIED) if exact else shapes:
                chosen = packed_tiling(shape.new * group, dim, *[dtype.itemsize] * 2, machine.shared_memory)
                name = f"D={dim}, {str(dtype).removeprefix('torch.')}, G={group}, {shape}"
                candidates = [one for one in of_heads if worth_a_try(one, shape.new * group)]
                prepare = lambda given=(shape, group, dim, dtype): packed_timer(*given)  # noqa: E731
                yield case_of("packed-attention", name, candidates, chosen, prepare)


def worth_a_try(tiling: PackedTiling, row_queries: int) -> bool:
    """Whether a row's queries would fill a quarter of a tile, and need no more than 256 of them."""
    return tiling.queries <= max(16, 4 * row_queries) and row_queries <= 256 * tiling.queries


def packed_tilings(machine: Machine, dim: int, itemsize: int, quick: bool) -> list[PackedTiling]:
    """Return those that fit: a warp has 16 queries at least where they are enough, and registers for its results."""
    if itemsize == 4:
        sizes = itertools.product((16, 32), (16, 32, 64), (1, 2), (4, 8))
    elif quick:
        sizes = itertools.product((16, 64, 128), {64: (64,), 128: (64, 128)}.get(dim, (32, 64)), (2, 3), (4, 8))
    else:
        sizes = itertools.product((16, 32, 64, 128), (32, 64, 128), (2, 3, 4), (2, 4, 8))
    return [
        tiling
        for tiling in itertools.starmap(PackedTiling, sizes)
        if tiling.keys * tiling.stages * 2 * dim * itemsize
        <= machine.shared_memory - FREE - tiling.queries * dim * itemsize
        and (tiling.warps <= 4 or tiling.queries * dim >= 64 * 128)
        and tiling.queries * dim <= tiling.warps * 64 * 64
    ]


def packed_timer(shape: Packed, group: int, dim: int, dtype: torch.dtype) -> Callable[[PackedTiling], float]:
    from compiled_llm_ops.kernels.attention.packed import PackedQueries, attend

    kv_heads = 8 if dim < FEWER_HEADS else 2
    length = shape.stored + shape.new
    count = -(-length // PAGE_SIZE)
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (shape.rows * count, 2, kv_heads, PAGE_SIZE, dim)
    pages = copies_of(torch.randn(sizes, generator=generator, device="cuda", dtype=dtype))
    query = torch.randn(shape.rows * shape.new, kv_heads * group, dim, generator=generator, device="cuda", dtype=dtype)
    indices = torch.randperm(shape.rows * count, generator=generator, device="cuda").int()
    qo_indptr, starts = (
        torch.arange(0, (shape.rows + 1) * each, each, dtype=torch.int32, device="cuda") for each in (shape.new, count)
    )
    last = torch.full((shape.rows,), (length - 1) % PAGE_SIZE + 1, dtype=torch.int32, device="cuda")
    out = torch.empty_like(query)

    def launch(tiling: PackedTiling, number: int) -> None:
        table = (qo_indptr, starts, None, indices)
        given = (query, pages[number % len(pages)], *table, 1 / math.sqrt(dim), -1, 0.0, None, None, last)
        attend(PackedQueries(*given), out, None, tiling)

    return lambda tiling: captured(lambda number: launch(tiling, number))
