"""Log-probabilities of tokens that have been chosen, and of the likeliest ones, from the logits of some rows.

They are computed beside what is compiled and recorded, for rows that want them alone.

Shapes: R rows that want them, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.sampling.sampling import SamplingTables
from compiled_llm_ops import COUNTED, FILTERED, Seldom, top_logprobs
from compiled_llm_ops.edits import EditTables, Places, edited
from compiled_llm_ops.filters import Filters, filtered

_AT_ONCE = 2**24
"""Numbers of ``[R, V]`` float32 that are sorted together."""


class Draws(NamedTuple):
    """How rows have chosen their tokens.

    Attributes:
        slots: ``[R]`` int64.
        positions: ``[R]`` int64, of the tokens that were chosen.
        tables: what the slots hold; ``counts`` has these tokens already.
        kinds: the edits of all rows, or-ed together.
    """

    slots: Tensor
    positions: Tensor
    tables: SamplingTables
    kinds: int


class ScoredTokens(NamedTuple):
    """What has come of the logits of some rows, on the host.

    Attributes:
        chosen: ``[R]`` float32, of the tokens that were chosen.
        ranks: ``[R]`` int32: 1 and how many tokens are likelier.
        values: ``[R, K]`` float32, the largest ones, in descending order.
        tokens: ``[R, K]`` int32, whose they are.
    """

    chosen: NDArray[np.float32]
    ranks: NDArray[np.int32]
    values: NDArray[np.float32]
    tokens: NDArray[np.int32]

    @classmethod
    def unpacked(cls, numbers: NDArray[np.int32], rows: int) -> ScoredTokens:
        """Return what ``score_tokens`` has packed."""
        columns = numbers.reshape(rows, -1)
        most = columns.shape[1] // 2 - 1
        floats = columns.view(np.float32)
        return cls(floats[:, 0], columns[:, 1], floats[:, 2 : 2 + most], columns[:, 2 + most :])

    def packed(self, most: int) -> list[bytes]:
        """Return the numbers of each row by itself: ``chosen``, ``ranks``, and of ``most`` tokens those that there are.

        Each is a copy, so that who keeps one row's keeps no other's.
        """
        floats = self.chosen[:, None], self.values[:, :most]
        chosen, values = (part.view(np.int32) for part in floats)
        numbers = np.concatenate([chosen, self.ranks[:, None], values, self.tokens[:, :most]], axis=1)
        rows: list[bytes] = numbers.view(f"V{4 * numbers.shape[1]}").ravel().tolist()
        return rows


def score_tokens(logits: Tensor, tokens: Tensor, most: int, draws: Draws | None = None) -> Tensor:
    """Compute log-probabilities in float32, and wait for nothing.

    Args:
        logits: ``[R, V]``, at least one row.
        tokens: ``[R]`` int64, those that were chosen; one that is none (-1) counts as the first.
        most: K, at most V.
        draws: what changed the distribution that tokens were chosen from; None for that of the model.

    Returns:
        ``[R * (2 + 2 * K)]`` int32, for ``ScoredTokens.unpacked``.
    """
    if draws is None:
        return top_logprobs(logits, tokens, most).view(-1)
    rows = max(1, _AT_ONCE // logits.shape[1])
    parts = []
    for start in range(0, len(logits), rows):
        some = slice(start, start + rows)
        places = draws._replace(slots=draws.slots[some], positions=draws.positions[some])
        scores = processed(logits[some], tokens[some], places)
        parts.append(top_logprobs(scores, tokens[some], most))
    return torch.cat(parts).view(-1)


def processed(logits: Tensor, tokens: Tensor, draws: Draws) -> Tensor:
    """Return ``[R, V]`` float32 scores that rows have chosen from, -inf where they did not; waits for nothing.

    What is kept is what ``sample_tokens`` keeps: tokens as likely as the last one are kept, too. Of a row that takes
    the likeliest token all are.
    """
    slots, positions, tables, kinds = draws
    scores = logits.float()
    if kinds:
        counts = _counts_before(tables, slots, tokens)
        scores = edited(logits, Places(slots, positions), EditTables.of(tables), counts, kinds)
    greedy, temperature = tables.temperature[slots] == 0, tables.temperature[slots]
    scores = scores / torch.where(greedy, 1.0, temperature)[:, None]
    seldom = tables.seldom[slots] if kinds & FILTERED else None
    if seldom is not None:
        seldom = torch.where((tables.edits[slots] & FILTERED != 0)[:, None], seldom, seldom.new_tensor(Seldom()))
    kept = filtered(scores, Filters(tables.top_k[slots], tables.top_p[slots], tables.min_p[slots], seldom))
    return torch.where(greedy[:, None], scores, kept)


def _counts_before(tables: SamplingTables, slots: Tensor, tokens: Tensor) -> Tensor:
    """Return ``[R, V]`` int16, what rows had counted before they chose ``tokens``."""
    counts, at = tables.counts[slots], tokens.clamp(min=0)[:, None]
    after = counts.gather(1, at)
    counted = (tables.edits[slots] & COUNTED != 0)[:, None] & (tokens >= 0)[:, None] & (after > 1)
    return counts.scatter(1, at, torch.where(counted, after - 2, after))
