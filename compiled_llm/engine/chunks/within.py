"""Chunks that keep steps within a time."""

from __future__ import annotations

from compiled_llm.engine.chunks.state import ChunkState
from compiled_llm.engine.chunks.step_times import SIZES, place_of

SMALLEST = 16
"""Chunks of so many tokens run however long that takes."""


class Within:
    """A policy by which steps take so many ``seconds`` at most, as far as the steps so far tell."""

    # A chunk twice as large as any that was seen is taken to last twice as long, so chunks grow step by step.

    def __init__(self, max_step_ms: float) -> None:
        self.seconds = max_step_ms / 1000

    def plan(self, state: ChunkState) -> int:
        longer = state.times.longer(state.rows)
        if longer is None:
            return SMALLEST
        without = (state.times.decode(state.rows) or 0.0) if state.rows else 0.0
        sizes = SIZES[: place_of(state.most + state.padding) + 1]
        fits = [size for size, seconds in zip(sizes, longer, strict=False) if without + seconds <= self.seconds]
        return max(SMALLEST, fits[-1] - state.padding if fits else 0)
