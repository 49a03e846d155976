"""Prompts as long as a step may have them."""

from __future__ import annotations

from compiled_llm.engine.chunks.state import ChunkState


class Whole:
    """A policy by which prompts run whole, however long the step takes."""

    def plan(self, state: ChunkState) -> int:
        return state.most
