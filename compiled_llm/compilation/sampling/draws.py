"""Draws tokens outside the graph, from scores that processors have finished with."""

# Shapes: B rows, V vocabulary.

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm.compilation.sampling.sampling import SamplingTables, sample_with_seeds


class Draws:
    """A draw of tokens from finished scores: those that ``sample`` would for the same seeds and positions."""

    def __init__(self, seeds: Tensor | None, positions: Tensor) -> None:
        """Draw with ``seeds`` ``[B]`` int64, on the scores' device, from ``positions`` on, or take the largest."""
        self._seeds = seeds
        self._positions = positions
        self._tables: SamplingTables | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        """Draw tokens ``[B]`` int64 from scores ``[B, V]`` float32."""
        # ``NOT_A_TOKEN`` for a row that is drawn and whose scores are NaN, +inf or all -inf.
        if self._seeds is None:
            return scores.argmax(dim=-1)
        if self._tables is None:
            self._tables = SamplingTables.drawing(scores.shape[1], scores.device)
        positions = self._positions
        self._positions = positions + 1
        slots = torch.zeros_like(positions)  # one for all rows, since nothing is counted
        return sample_with_seeds(self._seeds, scores, slots, positions, self._tables)
