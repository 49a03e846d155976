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

_AT_ONCE = 2**24
"""Numbers of ``[R, V]`` float32 that are computed together."""
_TILE = 128
"""Neighbouring tokens, of which the largest says whether any can be among the likeliest."""


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


class TopLogprobs(NamedTuple):
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
    def unpacked(cls, numbers: NDArray[np.int32], rows: int) -> TopLogprobs:
        """Return what ``top_logprobs`` has packed."""
        columns = numbers.reshape(rows, -1)
        most = columns.shape[1] // 2 - 1
        values = np.ascontiguousarray(columns[:, 2 : 2 + most]).view(np.float32)
        return cls(columns[:, 0].copy().view(np.float32), columns[:, 1], values, columns[:, 2 + most :])


def top_logprobs(logits: Tensor, tokens: Tensor, most: int, filters: Filters | None = None) -> Tensor:
    """Compute log-probabilities in float32, and wait for nothing.

    Args:
        logits: ``[R, V]``, at least one row.
        tokens: ``[R]`` int64, those that were chosen; one that is none (-1) counts as the first.
        most: K, at most V.
        filters: what is left out of the distribution; None for nothing.

    Returns:
        ``[R * (2 + 2 * K)]`` int32, for ``TopLogprobs.unpacked``.
    """
    rows = max(1, _AT_ONCE // logits.shape[1])
    parts = []
    for start in range(0, len(logits), rows):
        some = slice(start, start + rows)
        of_some = None if filters is None else Filters(*(column[some] for column in filters))
        parts.append(_packed(logits[some], tokens[some], most, of_some))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(-1)


def _packed(logits: Tensor, tokens: Tensor, most: int, filters: Filters | None) -> Tensor:
    scores = logits if filters is None else processed(logits, filters)
    values = torch.log_softmax(scores, dim=-1, dtype=torch.float32)
    chosen = values.gather(1, tokens.clamp(min=0)[:, None])
    ranks = (values > chosen).sum(dim=-1, keepdim=True) + 1
    columns = [chosen.view(torch.int32), ranks.int()]
    if most:
        best, at = _likeliest(values, most)
        columns += [best.view(torch.int32), at.int()]
    return torch.cat(columns, dim=1)


def _likeliest(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the ``most`` largest of each row and their places, in descending order.

    They lie in the tiles with the largest maxima, so that a small part of each row is sorted.
    """
    tiles = values.shape[1] // _TILE
    if tiles <= most:
        return values.topk(most)
    rest = tiles * _TILE
    tiled = values[:, :rest].unflatten(1, (tiles, _TILE))
    where = tiled.amax(dim=-1).topk(most, sorted=False).indices[:, :, None]
    inside = torch.arange(_TILE, device=values.device)
    found = tiled.gather(1, where.expand(-1, -1, _TILE)).flatten(1)
    places = (where * _TILE + inside).flatten(1)
    if rest < values.shape[1]:
        found = torch.cat([found, values[:, rest:]], dim=1)
        beyond = torch.arange(rest, values.shape[1], device=values.device).expand(len(values), -1)
        places = torch.cat([places, beyond], dim=1)
    best, at = found.topk(most)
    return best, places.gather(1, at)


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
