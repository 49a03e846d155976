"""How products of rows with the experts that they chose are cut up for the Triton kernels."""

# None of these numbers has been fitted to measurements yet.
# Shapes: T rows, k experts of each, P = T * k pairs, E experts, I inputs, O outputs.

from __future__ import annotations

from typing import NamedTuple

from compiled_llm_ops.contracts.devices import power_of_two

MAX_STEP_ROWS = 64
"""Rows up to which programs look for the pairs of an expert themselves; with more, pairs are sorted first."""

FEW = 16  # rows of the smallest tile that tensor cores multiply; most experts of a decode step have fewer

CHUNK = 128
"""Pairs among which a program looks at a time for its expert's; with more than FEW rows four times as many."""
# Each look waits for memory.

LEAST_PROGRAMS = 256  # programs that a step should have, about two for each multiprocessor of an H100


class ExpertsTiling(NamedTuple):
    """One way to cut a product up; a program multiplies a tile of rows with outputs of one expert, over all inputs."""

    rows: int  # of a tile; in a step, of a tile of experts that more than FEW rows chose
    outputs: int  # outputs of a tile; those of a gate come on top
    inputs: int  # inputs that a program multiplies at a time
    stages: int  # blocks of inputs on their way at a time, in a step for experts that at most FEW rows chose
    warps: int
    chunk: int = CHUNK  # pairs among which a program of a step looks for those of its expert at a time


def step_tiling(rows: int, places: int, outputs: int, inputs: int, itemsize: int, gated: bool) -> ExpertsTiling:
    """Return the tiling for up to MAX_STEP_ROWS rows, and so many programs for each tile of outputs."""
    parts = 2 if gated else 1
    tile = 64 // parts
    while tile > FEW and places * -(-outputs // tile) < LEAST_PROGRAMS:
        tile //= 2
    block = min(256 // itemsize, max(16, power_of_two(inputs)))
    if rows <= FEW:
        return ExpertsTiling(FEW, tile, block, 4, 4)
    return ExpertsTiling(MAX_STEP_ROWS, tile, block, 4, 4, 4 * CHUNK)


def packed_tiling(pairs: int, experts: int, itemsize: int, gated: bool) -> ExpertsTiling:
    """Return the tiling for pairs that are sorted by expert."""
    parts, mean = 2 if gated else 1, pairs / max(1, experts)
    if itemsize > 2:
        return ExpertsTiling(16 if mean <= 16 else 64, 64 // parts, 32, 2, 4)
    if mean <= 16:
        return ExpertsTiling(16, 64 // parts, 128, 3, 4)
    return ExpertsTiling(64, 128 // parts, 64, 3, 4) if mean <= 64 else ExpertsTiling(128, 128 // parts, 64, 3, 8)


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Return how many tiles of so many rows there are at most, however pairs are divided among experts."""
    return pairs // rows + min(pairs, experts)
