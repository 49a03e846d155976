"""Filters of the tokens to draw from, in operations of PyTorch that do not wait for the device."""

# The order and the sets are those of transformers' processors; tokens as likely as the last that is kept are kept too.
# Shapes: R rows, V vocabulary.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Filters(NamedTuple):
    """The filters of rows."""

    top_k: Tensor  # ``[R]`` integers; 0, or V and more, for all
    top_p: Tensor  # ``[R]`` float32; 1.0 for all
    min_p: Tensor  # ``[R]`` float32; 0.0 for all


def filtered(scores: Tensor, filters: Filters) -> Tensor:
    """Return ``[R, V]`` scores in float32, -inf for tokens that are not drawn: by top-k, then top-p, then min-p."""
    # Each filters what the one before has left; ``scores`` are divided by the temperature.
    ordered = scores.sort(dim=-1, descending=True).values
    limit = torch.where(filters.top_k > 0, filters.top_k, scores.shape[1]).long().clamp(max=scores.shape[1]) - 1
    smallest = ordered.gather(1, limit[:, None])
    smallest = smallest.maximum(_smallest_of_top_p(ordered, smallest, filters.top_p[:, None]))
    smallest = smallest.maximum(ordered[:, :1] + filters.min_p.log()[:, None])
    return scores.masked_fill(scores < smallest, -math.inf)


def _smallest_of_top_p(ordered: Tensor, smallest: Tensor, top_p: Tensor) -> Tensor:
    """Return ``[R, 1]``, the last of the largest scores that together have ``top_p`` of those from ``smallest`` on."""
    weights = (ordered - ordered[:, :1]).exp_().masked_fill_(ordered < smallest, 0)
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    short = (mass < mass[:, -1:] * top_p.double()).sum(dim=-1, keepdim=True)
    last = short.clamp(max=ordered.shape[1] - 1)
    return torch.where(top_p < 1, ordered.gather(1, last), -math.inf)
