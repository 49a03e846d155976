"""Batch-invariant kernels: `kernels/attention/invariant_tiling.py` and `kernels/linear/invariant_tiling.py`.

Candidates of attention with equally many keys in a tile have equal bits, and may be chosen by the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from compiled_llm_ops.kernels.attention.invariant_tiling import invariant_decode_tiling, invariant_tiling
from compiled_llm_ops.kernels.attention.packed_tiling import PackedTiling
from compiled_llm_ops.kernels.linear.invariant_tiling import (
    TILES,
    InvariantLinearTiling,
    LinearDevice,
    invariant_linear_tiling,
)
from fitting.cases import HEAD_DIM, KV_HEADS, PAGE_SIZE, Case, Machine, case_of, pages_of, random
from fitting.linear import products
from fitting.measuring import captured, copies_of


def invariant_linear_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    """Rows of decode steps and of prefills."""
    for name, (n, k) in products(quick).items():
        device = LinearDevice(machine.shared_memory, machine.processors, machine.hopper)
        for m in (32, 256, 2048) if quick else (1, 8, 32, 64, 128, 256, 1024, 4096):
            chosen = invariant_linear_tiling(m, n, 2, device)
            prepare = lambda m=m, n=n, k=k: linear_timer(m, n, k)  # noqa: E731
            yield case_of("invariant-linear", f"{name}, M={m}", linear_tilings(quick), chosen, prepare)


def linear_tilings(quick: bool) -> list[InvariantLinearTiling]:
    sizes = itertools.product((64, 128), (16, 32, 64, 128, 256), (64, 128), (3, 4, 6), (4, 8))
    others = [
        InvariantLinearTiling(rows, outputs, inputs, stages, warps)
        for rows, outputs, inputs, stages, warps in sizes
        if (rows + outputs) * inputs * 2 * stages <= 200 * 1024
        and warps == (8 if rows * outputs >= 128 * 128 else 4)
        and not (quick and (stages == 3 or (rows == 128 and outputs < 64)))
    ]
    return [*TILES, *others]


def linear_timer(m: int, n: int, k: int) -> Callable[[InvariantLinearTiling], float]:
    from compiled_llm_ops.kernels.linear.invariant import multiply

    rows, weights = random(m, k), copies_of(random(n, k))

    def launch(tiling: InvariantLinearTiling, number: int) -> Tensor:
        return multiply(rows + 0, weights[number % len(weights)], None, tiling)

    return lambda tiling: captured(lambda number: launch(tiling, number))


def invariant_attention_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    """Rows of one token each, and a prompt."""
    shapes = [(1, 2048), (32, 600), (256, 600)] if quick else [(1, 160), (1, 4096), (8, 2048), (32, 600), (256, 600)]
    for gqa in (2, 4) if quick else (1, 2, 4, 8):
        for rows, length in shapes:
            name = f"B={rows}, G={gqa}, {length} keys"
            chosen = invariant_decode_tiling(HEAD_DIM, gqa, rows * KV_HEADS, machine.processors)
            prepare = lambda given=([1] * rows, [length] * rows, gqa): attention_timer(*given)  # noqa: E731
            yield case_of("invariant-attention", name, attention_tilings(quick), chosen, prepare)
        chosen = invariant_tiling(HEAD_DIM)
        prepare = lambda gqa=gqa: attention_timer([512] * 8, [1024] * 8, gqa)  # noqa: E731
        yield case_of("invariant-attention", f"8 x 512 tokens, G={gqa}", attention_tilings(quick), chosen, prepare)


def attention_tilings(quick: bool) -> list[PackedTiling]:
    few = ((16, 64, 128), (64, 128), (2, 3), (2, 4, 8))
    sizes = few if quick else ((16, 32, 64, 128), (32, 64, 128), (2, 3, 4), (2, 4, 8))
    tilings = (PackedTiling(*given, fuses=False, ordered=True) for given in itertools.product(*sizes))
    return [
        tiling for tiling in tilings if tiling.keys * tiling.stages <= 256 and 4 <= tiling.queries // tiling.warps <= 16
    ]


def attention_timer(queries: Sequence[int], lengths: Sequence[int], gqa: int) -> Callable[[PackedTiling], float]:
    from compiled_llm_ops.kernels.attention.packed import PackedQueries, attend

    counts = [-(-length // PAGE_SIZE) for length in lengths]
    pages = pages_of(sum(counts))
    indptr, starts = (
        torch.tensor([0, *itertools.accumulate(given)], dtype=torch.int32, device="cuda") for given in (queries, counts)
    )
    qo_indptr = None if set(queries) == {1} else indptr
    ends = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    indices = torch.randperm(sum(counts), device="cuda").int()
    query = random(sum(queries), KV_HEADS * gqa, HEAD_DIM)
    out = torch.empty_like(query)

    def launch(tiling: PackedTiling, number: int) -> None:
        table = (qo_indptr, starts, ends, indices)
        given = PackedQueries(query, pages[number % len(pages)], *table, HEAD_DIM**-0.5, -1, 0.0, None, None)
        attend(given, out, None, tiling)

    return lambda tiling: captured(lambda number: launch(tiling, number))
