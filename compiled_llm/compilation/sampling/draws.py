"""Draws tokens outside the graph, from scores that processors have finished with.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_llm.compilation.sampling.sampling import SamplingTables, sample_with_seeds


class Draws:
    """Draws tokens from scores that processors have finished with, one step after the other, without a wait.

    The tokens are those that ``sample`` would draw for the same seeds and positions.
    """

    def __init__(self, seeds: Tensor | None, positions: Tensor) -> None:
        """Take the largest score if there are no ``seeds``, else draw with them, from ``positions`` on.

        Both are ``[B]`` int64; the seeds are on the device of the scores.
        """
        self._seeds = seeds
        self._positions = positions
        self._tables: SamplingTables | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        """Draw the next step's tokens from scores ``[B, V]`` float32.

        Returns:
            ``[B]`` int64; ``NOT_A_TOKEN`` for a row that is drawn and whose scores are NaN, +inf or all -inf.
        """
        if self._seeds is None:
            return scores.argmax(dim=-1)
        if self._tables is None:
            self._tables = SamplingTables.allocate(0, scores.shape[1], scores.device)
            self._tables.temperature.fill_(1.0)
        positions = self._positions
        self._positions = positions + 1
        slots = torch.zeros_like(positions)  # one for all rows, since nothing is counted
        return sample_with_seeds(self._seeds, scores, slots, positions, self._tables)
