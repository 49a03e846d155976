"""Log-probabilities of tokens that have been chosen, and of the likeliest ones, from the logits of some rows.

They are computed beside what is compiled and recorded, for rows that want them alone.

Shapes: R rows that want them, V vocabulary, K likeliest tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm_ops import top_logprobs

_AT_ONCE = 2**24
"""Numbers of ``[R, V]`` float32 that are sorted together."""


class Filters(NamedTuple):
    """What rows draw from, in the order in which it is applied.

    Attributes:
        temperature: ``[R]`` float32, above 0.
        top_k: ``[R]`` int64; V or more for all.
        top_p: ``[R]`` float32.
        min_p: ``[R]`` float32.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


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
        values = np.ascontiguousarray(columns[:, 2 : 2 + most]).view(np.float32)
        return cls(columns[:, 0].copy().view(np.float32), columns[:, 1], values, columns[:, 2 + most :])


def score_tokens(logits: Tensor, tokens: Tensor, most: int, filters: Filters | None = None) -> Tensor:
    """Compute log-probabilities in float32, and wait for nothing.

    Args:
        logits: ``[R, V]``, at least one row.
        tokens: ``[R]`` int64, those that were chosen; one that is none (-1) counts as the first.
        most: K, at most V.
        filters: what is left out of the distribution; None for nothing.

    Returns:
        ``[R * (2 + 2 * K)]`` int32, for ``ScoredTokens.unpacked``.
    """
    if filters is None:
        return top_logprobs(logits, tokens, most).view(-1)
    rows = max(1, _AT_ONCE // logits.shape[1])
    parts = []
    for start in range(0, len(logits), rows):
        some = slice(start, start + rows)
        scores = processed(logits[some], Filters(*(column[some] for column in filters)))
        parts.append(top_logprobs(scores, tokens[some], most))
    return torch.cat(parts).view(-1)


def processed(logits: Tensor, filters: Filters) -> Tensor:
    """Return ``[R, V]`` float32 scores that rows draw from, -inf where they do not; waits for nothing.

    What is kept is what ``sample_tokens`` keeps: tokens as likely as the last one are kept, too.
    """
    scores = logits.float() / filters.temperature[:, None]
    ordered = scores.sort(dim=-1, descending=True).values
    last = (filters.top_k.clamp(max=scores.shape[1]) - 1)[:, None]
    smallest = ordered.gather(1, last)
    weights = (ordered - ordered[:, :1]).exp_().masked_fill_(ordered < smallest, 0)
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    short = (mass < mass[:, -1:] * filters.top_p.double()[:, None]).sum(dim=-1, keepdim=True)
    nucleus = torch.where(filters.top_p[:, None] < 1, ordered.gather(1, short.minimum(last)), -math.inf)
    floor = ordered[:, :1] + filters.min_p.log()[:, None]
    return scores.masked_fill(scores < smallest.maximum(nucleus).maximum(floor), -math.inf)


def neutral(vocabulary: int) -> dict[str, Any]:
    """Return the filters of a row that leaves nothing out."""
    return {"temperature": 1.0, "top_k": vocabulary, "top_p": 1.0, "min_p": 0.0}
