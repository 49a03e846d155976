"""Matmuls of few rows: `kernels/linear/skinny_tiling.py` and `chained_tiling.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from compiled_llm_ops import normed_linear, skinny_linear
from compiled_llm_ops.kernels.linear import chained_tiling, skinny_tiling
from compiled_llm_ops.kernels.linear.chained_tiling import HELD_BLOCK, ChainedTiling, MatmulTile, choose_chained_tiling
from compiled_llm_ops.kernels.linear.skinny_tiling import LinearTiling, choose_linear_tiling, choose_normed_tiling
from fitting.cases import MODELS, VOCABULARY, Case, Machine, case_of, random
from fitting.measuring import captured, copies_of

# ---- linear and normed: `kernels/linear/skinny_tiling.py`


def products(quick: bool) -> dict[str, tuple[int, int]]:
    """`(N, K)` of the matmuls of decode steps."""
    found: dict[str, tuple[int, int]] = {}
    for model, (hidden, query, kv, intermediate) in MODELS.items():
        found |= {
            f"{model} qkv": (query + 2 * kv, hidden),
            f"{model} out": (hidden, query),
            f"{model} gate, up": (2 * intermediate, hidden),
            f"{model} down": (hidden, intermediate),
        }
        if not quick:
            found[f"{model} vocabulary"] = (VOCABULARY, hidden)
    return found


def linear_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    for name, (n, k) in products(quick).items():
        for m in (1, 2, 8, 32, 64, 128) if quick else (1, 2, 4, 8, 16, 32, 33, 48, 64, 96, 128, 192, 256, 384, 512):
            chosen = choose_linear_tiling(m, n, k, machine.processors)
            candidates = [*few_row_tilings(m, k), *tensor_core_tilings(m, k), None]
            yield case_of("linear", f"{name}, M={m}", candidates, chosen, lambda m=m, n=n, k=k: linear_timer(m, n, k))


def few_row_tilings(m: int, k: int) -> list[LinearTiling]:
    """Tilings without tensor cores, up to twice the registers that the rule allows for what is prefetched."""
    if m > 2 or k % 16:
        return []
    return [
        LinearTiling(m, outputs, 1, inputs, stages=1, prefetched=prefetched)
        for inputs in (skinny_tiling.WIDE_BLOCK, 2 * skinny_tiling.WIDE_BLOCK)
        for outputs in (2, 4, 8)
        for prefetched in sorted({1, -(-k // inputs)})
        if prefetched * outputs * inputs <= 2 * skinny_tiling.PREFETCHED_WEIGHTS
    ]


def tensor_core_tilings(m: int, k: int) -> list[LinearTiling]:
    if m < 2 or m > skinny_tiling.MAX_ROWS or k % skinny_tiling.BLOCK:
        return []
    rows = min(max(16, 1 << (m - 1).bit_length()), skinny_tiling.TILE_ROWS)
    found = []
    few = (64,) if rows < skinny_tiling.TILE_ROWS else (16, 32, 64)  # tensor cores take 64 rows of a tile
    for outputs in few if m <= skinny_tiling.TILE_ROWS else (64, 128):
        for tiles in range(1, skinny_tiling.MAX_TILES + 1):
            for inputs in (skinny_tiling.BLOCK, 2 * skinny_tiling.BLOCK):
                stages = skinny_tiling.stages_that_fit(rows, outputs * tiles, inputs)
                if stages >= 3:
                    found.append(LinearTiling(rows, outputs, tiles, inputs, stages, prefetched=0))
    return found


def linear_timer(m: int, n: int, k: int) -> Callable[[LinearTiling | None], float]:
    """Each matmul comes after a small kernel, whose time is part of every candidate's."""
    from compiled_llm_ops.kernels.linear.skinny import multiply

    rows, weights = random(m, k), copies_of(random(n, k))

    def launch(tiling: LinearTiling | None, number: int) -> Tensor:
        inputs, weight = rows + 0, weights[number % len(weights)]
        return inputs @ weight.T if tiling is None else multiply(inputs, weight, tiling, pdl=True)

    return lambda tiling: captured(lambda number: launch(tiling, number))


def normed_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    """The matmuls of one row that come after a norm, SwiGLU included."""
    for name, (n, k) in products(quick).items():
        if name.endswith(("out", "down")):
            continue  # they read what attention and SwiGLU wrote
        gated = name.endswith("gate, up")
        plain = choose_linear_tiling(1, n, k, machine.processors)
        if plain is None:
            continue
        candidates: list[LinearTiling | None] = [None]
        if plain.prefetched * plain.inputs >= k:  # a program norms the whole row
            candidates += [plain._replace(outputs=plain.outputs * factor) for factor in (1, 2, 4)]
        chosen = choose_normed_tiling(n, k, machine.processors)
        prepare = lambda n=n, k=k, plain=plain, gated=gated: normed_timer(n, k, plain, gated)  # noqa: E731
        yield case_of("normed", f"{name}, M=1", candidates, chosen, prepare)


def normed_timer(n: int, k: int, plain: LinearTiling, gated: bool) -> Callable[[LinearTiling | None], float]:
    """None stands for two launches, the norm and then the matmul."""
    from compiled_llm_ops.kernels.linear.norm import add_rms_norm
    from compiled_llm_ops.kernels.linear.skinny import Normed, multiply_few

    states, update, norm, weights = random(1, k), random(1, k), random(k), copies_of(random(n, k))

    def launch(tiling: LinearTiling | None, number: int) -> Tensor:
        added, weight = update + 0, weights[number % len(weights)]
        if tiling is None:
            _, row = add_rms_norm(states, added, norm, 1e-6, pdl=True)
            return multiply_few(row, weight, plain, gated=gated, pdl=True)
        normed = Normed(added, norm, 1e-6, torch.empty_like(states))
        return multiply_few(states, weight, tiling, normed=normed, gated=gated, pdl=True)

    return lambda tiling: captured(lambda number: launch(tiling, number))


# ---- chained: `kernels/linear/chained_tiling.py`


def chained_cases(machine: Machine, quick: bool) -> Iterator[Case]:
    """What follows attention and what follows the gate, up to the next of them; None are separate kernels."""
    for model, (hidden, query, kv, intermediate) in MODELS.items():
        if query % HELD_BLOCK or intermediate > chained_tiling.HELD_INPUTS:
            continue
        pairs = {"out, gate and up": (query, intermediate, True), "down, qkv": (intermediate, query + 2 * kv, False)}
        for name, (k, next_n, gated) in pairs.items():
            for m in (2, 16, 64, 256) if quick else (2, 3, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256):
                chosen = choose_chained_tiling(m, hidden, k, next_n, gated, machine.processors)
                candidates = [None, *chained_tilings(chosen, m, gated)]
                prepare = lambda m=m, n=hidden, k=k, next_n=next_n, gated=gated: chained_timer(m, n, k, next_n, gated)  # noqa: E731
                yield case_of("chained", f"{model} {name}, M={m}", candidates, chosen, prepare)


def chained_tilings(chosen: ChainedTiling | None, m: int, gated: bool) -> Iterator[ChainedTiling]:
    """Return the chosen tiling with other tiles for the first or for the second matmul."""
    if chosen is None:
        return
    sizes = list(itertools.product((8, 16, 32, 64, 128), (16, 32, 64, 128), (64, 128, 256)))
    tiles = [MatmulTile(*size, 0) for size in sizes if min(m, 16) <= size[0] < 2 * max(m, 16) and max(size[:2]) >= 64]
    for tile in tiles:
        stages = min(6, skinny_tiling.stages_that_fit(tile.rows, tile.outputs, tile.inputs))
        if stages >= 3:
            yield chosen._replace(first=tile._replace(stages=stages))
        stages = min(6, skinny_tiling.stages_that_fit(tile.rows, tile.outputs * (2 if gated else 1), tile.inputs))
        if stages >= 3:
            yield chosen._replace(second=tile._replace(stages=stages))


def chained_timer(m: int, n: int, k: int, next_n: int, gated: bool) -> Callable[[ChainedTiling | None], float]:
    from compiled_llm_ops.kernels.linear.chained import multiply_and_add, multiply_scaled

    rows, states, norm, firsts = random(m, k), random(m, n), random(n), copies_of(random(n, k))
    seconds = copies_of(random(next_n * (2 if gated else 1), n))

    def launch(tiling: ChainedTiling | None, number: int) -> Tensor:
        given, first, second = rows + 0, firsts[number % len(firsts)], seconds[number % len(seconds)]
        if tiling is None:
            update = skinny_linear(given, first, overlap=True)
            return normed_linear(states, update, norm, 1e-6, second, gated, overlap=True)[1]
        scaled = multiply_and_add(given, first, states, norm, tiling, pdl=True)
        return multiply_scaled(scaled, second, 1e-6, tiling, gated=gated, pdl=True)

    return lambda tiling: captured(lambda number: launch(tiling, number))
