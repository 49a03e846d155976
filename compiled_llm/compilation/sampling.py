"""Choosing the next token inside the graph, with settings and random numbers for each row.

A draw inverts the cumulative distribution at a uniform number. That comes from a counter-based generator keyed by the
row's seed and counted by the token's position. So a replayed graph draws another number each step (positions advance in
the graph), and a row draws the same tokens whatever else runs in its batch.

Shapes: B rows, V vocabulary, X rows with settings of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_ops import NOT_A_TOKEN as NOT_A_TOKEN
from compiled_llm_ops import sample_tokens, uniform_numbers, uniform_of


@dataclass(frozen=True)
class Sampling:
    """How one row chooses its tokens.

    Attributes:
        temperature: divides the logits; 0.0 takes the most likely token.
        top_k: draw among the k most likely; 0 for all.
        top_p: draw among the most likely that together exceed this probability; 1.0 for all.
        min_p: draw among those at least this times as likely as the most likely; 0.0 for all.
        repetition_penalty: divides positive logits of tokens seen before, multiplies negative ones; 1.0 for none.
        seed: decides the row's draws.
        seen: ``[n]`` int64, tokens of the prompt that count as seen.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    seen: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    @property
    def forgets(self) -> bool:
        """Whether it does not matter which tokens the row has seen."""
        return self.repetition_penalty == 1.0


class SamplingTables(NamedTuple):
    """What the rows' slots hold on the device beside their pages; the last of the X is that of padding rows.

    Attributes:
        next_token: ``[X]`` int64, the token that was chosen last, which the row feeds in next.
        temperature: ``[X]`` float32.
        top_k: ``[X]`` int32.
        top_p: ``[X]`` float32.
        min_p: ``[X]`` float32.
        penalty: ``[X]`` float32.
        seed: ``[X]`` int64.
        seen: ``[X, V]`` bool.
    """

    next_token: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    seed: Tensor
    seen: Tensor

    @classmethod
    def allocate(cls, rows: int, vocabulary: int, device: torch.device) -> SamplingTables:
        """Allocate for ``rows`` rows and one for padding; all choose greedily."""
        entries = rows + 1
        return cls(
            torch.zeros(entries, dtype=torch.int64, device=device),
            torch.zeros(entries, dtype=torch.float32, device=device),
            torch.zeros(entries, dtype=torch.int32, device=device),
            torch.ones(entries, dtype=torch.float32, device=device),
            torch.zeros(entries, dtype=torch.float32, device=device),
            torch.ones(entries, dtype=torch.float32, device=device),
            torch.zeros(entries, dtype=torch.int64, device=device),
            torch.zeros(entries, vocabulary, dtype=torch.bool, device=device),
        )


def choose(logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables) -> Tensor:
    """Choose each row's next token, keep it in its slot and mark it as seen.

    Args:
        logits: ``[B, V]``.
        slots: ``[B]`` int64, each row's entry in ``tables``.
        positions: ``[B]`` int64, the position of the token that is chosen.
        tables: the settings; ``next_token`` and ``seen`` are written.

    Returns:
        ``[B]`` int64; ``NOT_A_TOKEN`` for a row that is drawn and whose logits are NaN, +inf or all -inf.
    """
    chosen = _choose_at(uniform(tables.seed[slots], positions), logits, slots, tables)
    tables.next_token.index_put_((slots,), chosen.clamp(min=0))
    return chosen


def draw(scores: Tensor, seeds: Tensor | None, positions: Tensor) -> Tensor:
    """Draw from scores that processors have finished with.

    Args:
        scores: ``[B, V]`` float32.
        seeds: ``[B]`` int64; if None, the token with the largest score is taken, as ``argmax`` does.
        positions: ``[B]`` int64, the position of the token that is drawn.

    Returns:
        ``[B]`` int64; ``NOT_A_TOKEN`` for a row that is drawn and whose scores are NaN, +inf or all -inf.
    """
    rows, vocabulary = scores.shape
    tables = SamplingTables.allocate(rows, vocabulary, scores.device)
    numbers = torch.zeros(rows, dtype=torch.float64, device=scores.device)
    if seeds is not None:
        tables.temperature.fill_(1.0)
        numbers = uniform(seeds, positions)
    return _choose_at(numbers, scores, torch.arange(rows, device=scores.device), tables)


def _choose_at(numbers: Tensor, logits: Tensor, slots: Tensor, tables: SamplingTables) -> Tensor:
    settings = (tables.temperature, tables.top_k, tables.top_p, tables.min_p, tables.penalty)
    return sample_tokens(logits, numbers, slots, *settings, tables.seen)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return ``[B]`` float64 in [0, 1), a function of its arguments alone.

    Args:
        seeds: ``[B]`` int64, not negative.
        positions: ``[B]`` int64, not negative; another position gives another number.
    """
    if seeds.device.type == "cpu":  # whose compiler takes seconds over the rounds, in each program
        return uniform_numbers(seeds, positions)
    return uniform_of(seeds, positions)
