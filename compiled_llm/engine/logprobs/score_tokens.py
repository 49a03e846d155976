"""Log-probabilities of sampled tokens, and of the most likely ones, from the logits of some rows."""

# They are computed outside of compiled and captured programs, for rows that ask for them alone.
# Shapes: R rows that ask for them, V vocabulary, K most likely tokens, or named ones.

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.sampling.sampling import SamplingTables
from compiled_llm_ops import top_logprobs
from compiled_llm_ops.sampling.adjustments import AdjustmentTables, Noted, Places, adjusted
from compiled_llm_ops.sampling.sampling import Filters, filtered

_AT_ONCE = 2**24
"""Numbers of ``[R, V]`` float32 that are sorted together."""


class SampledDraws(NamedTuple):
    """The draws by which R rows have sampled their tokens."""

    # ``slots`` and ``positions``, of the sampled tokens, are ``[R]`` int64; ``kinds`` are the logit adjustments of all
    # rows, or-ed together. ``noted`` was copied before the tokens were sampled: the tables have noted them since. It is
    # None if ``kinds`` is 0.

    slots: Tensor
    positions: Tensor
    tables: SamplingTables
    kinds: int
    noted: Noted | None

    def part(self, some: slice) -> SampledDraws:
        """Return those of some rows."""
        noted = None if self.noted is None else self.noted.part(some)
        return self._replace(slots=self.slots[some], positions=self.positions[some], noted=noted)


class ScoredTokens(NamedTuple):
    """Log-probabilities of some rows, on the host, of sampled tokens and of the most likely ones, or of named ones.

    Attributes:
        chosen: ``[R]`` float32, of the sampled tokens.
        ranks: ``[R]`` int32: 1 plus the number of more likely tokens.
        values: ``[R, K]`` float32, the largest ones, in descending order, or those of the named tokens.
        others: ``[R, K]`` int32, the tokens of the largest ones; the ranks of the named ones.
    """

    sampled: NDArray[np.float32]
    ranks: NDArray[np.int32]
    values: NDArray[np.float32]
    others: NDArray[np.int32]

    @classmethod
    def unpacked(cls, numbers: NDArray[np.int32], rows: int) -> ScoredTokens:
        """Unpack the result of ``score_tokens``."""
        columns = numbers.reshape(rows, -1)
        num_logprobs = columns.shape[1] // 2 - 1
        floats = columns.view(np.float32)
        return cls(floats[:, 0], columns[:, 1], floats[:, 2 : 2 + num_logprobs], columns[:, 2 + num_logprobs :])

    def of(self, start: int, stop: int) -> ScoredTokens:
        """Return those of rows ``start`` to ``stop``."""
        some = slice(start, stop)
        return ScoredTokens(self.sampled[some], self.ranks[some], self.values[some], self.others[some])

    def packed(self, num_logprobs: int) -> list[bytes]:
        """Return each row's numbers by itself, copied, so that keeping one row's does not keep the others'."""
        floats = self.sampled[:, None], self.values[:, :num_logprobs]
        sampled, values = (part.view(np.int32) for part in floats)
        numbers = np.concatenate([sampled, self.ranks[:, None], values, self.others[:, :num_logprobs]], axis=1)
        rows: list[bytes] = numbers.view(f"V{4 * numbers.shape[1]}").ravel().tolist()
        return rows


def score_tokens(logits: Tensor, tokens: Tensor, others: int | Tensor, draws: SampledDraws | None = None) -> Tensor:
    """Compute log-probabilities in float32, without waiting: ``[R * (2 + 2 * K)]`` int32, for ``unpacked``.

    Args:
        logits: ``[R, V]``, at least one row.
        tokens: ``[R]`` int64, the sampled ones; an invalid one (-1) counts as the first.
        others: K, at most V, or ``[R, K]`` int64, the named tokens; invalid ones (-1) count as the first.
        draws: changes of the distribution that tokens were sampled from; None for that of the model.
    """
    if draws is None and isinstance(others, int):
        return top_logprobs(logits, tokens, others).view(-1)
    rows = max(1, _AT_ONCE // logits.shape[1])
    parts = []
    for start in range(0, len(logits), rows):
        some = slice(start, start + rows)
        scores = logits[some]
        if draws is not None:
            scores = processed(scores, draws.part(some))
        parts.append(_numbers(scores, tokens[some], others if isinstance(others, int) else others[some]))
    return torch.cat(parts).view(-1)


def _numbers(scores: Tensor, tokens: Tensor, others: int | Tensor) -> Tensor:
    """Return ``[R, 2 + 2 * K]`` int32: bits of log-probabilities and ranks of ``tokens``, then what others have."""
    if isinstance(others, int):
        return top_logprobs(scores, tokens, others)
    return torch.cat([top_logprobs(scores, tokens, 0), _named(scores, others)], dim=1)


def _named(scores: Tensor, named: Tensor) -> Tensor:
    """Return ``[R, 2 * K]`` int32: the bits of the named tokens' log-probabilities, and their ranks."""
    values = torch.log_softmax(scores, dim=-1, dtype=torch.float32)
    own = values.gather(1, named.clamp(min=0))
    ranks = [(values > one).sum(dim=-1, keepdim=True) for one in own.split(1, dim=1)]
    return torch.cat([own.view(torch.int32), torch.cat(ranks, dim=1).int() + 1], dim=1)


def processed(logits: Tensor, draws: SampledDraws) -> Tensor:
    """Return ``[R, V]`` float32 scores that rows have sampled from, -inf for tokens left out; without waiting."""
    # It keeps the tokens that ``sample_tokens`` keeps: those as likely as the last one are kept, too. A row that takes
    # the most likely token keeps all.
    slots, positions, tables, kinds, noted = draws
    given = tables.arguments(logits, tables.seed, slots, positions)
    scores = logits.float()
    if kinds:
        assert noted is not None, "a tap copies it before the tokens are sampled"
        scores = adjusted(logits, Places(slots, positions), AdjustmentTables.of(given), noted, kinds)
    temperature = given.temperature[slots]
    greedy = temperature == 0
    scores = scores / torch.where(greedy, 1.0, temperature)[:, None]
    kept = filtered(scores, Filters.of(given, slots))
    return torch.where(greedy[:, None], scores, kept)
