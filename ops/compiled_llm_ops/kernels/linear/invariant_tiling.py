"""How the matmul of ``invariant_linear`` is tiled: by the weight's shape and dtype, never by the number of rows.

The order of the sums follows from BLOCK of the inputs. Not yet fitted: nothing has been measured on a GPU. In a decode
step the time is that of reading weights, so tiles of outputs are narrow enough to give each multiprocessor of a large
GPU one; in prefill narrow tiles read the rows more often.

Shapes: N outputs, K inputs.
"""

from __future__ import annotations

from typing import NamedTuple

ROWS = 64
"""Rows of a tile: what one instruction of a tensor core takes."""

BLOCK, BLOCK_OF_FLOAT32 = 128, 32
"""Inputs that are multiplied at a time."""

NARROWEST, WIDEST = 16, 128
"""Outputs of a tile."""

TILES = 96
"""Tiles of outputs that there are at least, if that leaves them NARROWEST."""

PIPELINE, PIPELINE_OF_WIDEST = 104 * 1024, 200 * 1024
"""Bytes of shared memory that a pipeline takes: half of a multiprocessor's at most, or all where tiles are wide."""

MAX_STAGES, STAGES_OF_FLOAT32 = 5, 2
"""Stages of the pipeline, at most."""

WARPS = 4

SUMMED = 1024
"""Numbers that a program of ``invariant_sum`` adds at a time."""

GROUPED = 8
"""Tiles of rows that follow each other with the same weights, which they read from the cache."""


class InvariantLinearTiling(NamedTuple):
    """Tiles of the matmul.

    Attributes:
        rows: of a tile.
        outputs: of a tile.
        inputs: multiplied at a time.
        stages: of the pipeline.
        warps: in a program.
    """

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


def invariant_linear_tiling(outputs: int, number_bytes: int) -> InvariantLinearTiling:
    """Return the tiling for a weight with so many outputs, whose numbers have so many bytes."""
    width = WIDEST
    while width > NARROWEST and -(-outputs // width) < TILES:
        width //= 2
    if number_bytes > 2:
        return InvariantLinearTiling(ROWS, min(width, 64), BLOCK_OF_FLOAT32, STAGES_OF_FLOAT32, WARPS)
    room = PIPELINE_OF_WIDEST if width == WIDEST else PIPELINE
    stages = min(MAX_STAGES, room // ((ROWS + width) * BLOCK * number_bytes))
    return InvariantLinearTiling(ROWS, width, BLOCK, stages, WARPS)
