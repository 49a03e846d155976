"""Filters of the tokens to draw from, in operations of PyTorch that do not wait for the device.

The order and the sets are those of transformers' processors; tokens as likely as the last that is kept are kept too.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.contracts import MAX_OF_TOP_H


class Filters(NamedTuple):
    """The filters of rows."""

    top_k: Tensor  # ``[R]`` integers; 0, or V and more, for all
    top_p: Tensor  # ``[R]`` float32; 1.0 for all
    min_p: Tensor  # ``[R]`` float32; 0.0 for all
    seldom: Tensor | None = None  # ``[R, len(Seldom._fields)]`` float32; None if no row has any of these


def filtered(scores: Tensor, filters: Filters) -> Tensor:
    """Return ``[R, V]`` scores, -inf for tokens that are not drawn.

    Top-h, top-k, top-p over the rest, min-p, typical, epsilon and eta, each over the tokens that the one before has
    left. ``scores`` are ``[R, V]`` float32, divided by the temperature.
    """
    ordered = scores.sort(dim=-1, descending=True).values
    limit = torch.where(filters.top_k > 0, filters.top_k, scores.shape[1]).long().clamp(max=scores.shape[1]) - 1
    smallest = ordered.gather(1, limit[:, None])
    if filters.seldom is not None:
        smallest = smallest.maximum(_smallest_of_top_h(ordered, filters.seldom[:, :1]))
    smallest = smallest.maximum(_smallest_of_top_p(ordered, smallest, filters.top_p[:, None]))
    smallest = smallest.maximum(ordered[:, :1] + filters.min_p.log()[:, None])
    scores = scores.masked_fill(scores < smallest, -math.inf)
    return scores if filters.seldom is None else _seldom_filtered(scores, filters.seldom)


def _smallest_of_top_h(ordered: Tensor, top_h: Tensor) -> Tensor:
    """Return ``[R, 1]``, the last of the largest scores whose share of their entropy is within ``top_h`` ``[R, 1]``."""
    largest = ordered[:, :MAX_OF_TOP_H]
    logs = largest.log_softmax(dim=-1)
    terms = torch.where(logs > -math.inf, -logs * logs.exp(), 0.0)
    within = (terms.cumsum(dim=-1) <= terms.sum(dim=-1, keepdim=True) * top_h) & (logs.exp() > 0)
    last = (within.sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    return torch.where(top_h > 0, largest.gather(1, last), -math.inf)


def _smallest_of_top_p(ordered: Tensor, smallest: Tensor, top_p: Tensor) -> Tensor:
    """Return ``[R, 1]``, the last of the largest scores that together have ``top_p`` of those from ``smallest`` on."""
    weights = (ordered - ordered[:, :1]).exp_().masked_fill_(ordered < smallest, 0)
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    short = (mass < mass[:, -1:] * top_p.double()).sum(dim=-1, keepdim=True)
    last = short.clamp(max=ordered.shape[1] - 1)
    return torch.where(top_p < 1, ordered.gather(1, last), -math.inf)


def _seldom_filtered(scores: Tensor, seldom: Tensor) -> Tensor:
    _, typical_p, epsilon, eta, *_ = seldom[:, :, None].unbind(dim=1)
    scores = _typical(scores, typical_p)
    scores = _likelier_than(scores, epsilon)
    return _likelier_than(scores, eta.minimum(eta.sqrt() * (-_entropy(scores)).exp()))


def _typical(scores: Tensor, mass: Tensor) -> Tensor:
    """Keep those of ``mass`` ``[R, 1]`` whose information is closest to the entropy."""
    distances, order = (scores.log_softmax(dim=-1) + _entropy(scores)).abs().sort(dim=-1)
    reached = scores.gather(1, order).softmax(dim=-1).cumsum(dim=-1)
    last = (reached < mass).sum(dim=-1, keepdim=True).clamp(max=scores.shape[1] - 1)
    furthest = torch.where(mass < 1, distances.gather(1, last), math.inf)
    away = (scores.log_softmax(dim=-1) + _entropy(scores)).abs() > furthest
    return scores.masked_fill(away, -math.inf)


def _likelier_than(scores: Tensor, least: Tensor) -> Tensor:
    """Keep those whose probability is at least ``least`` ``[R, 1]``, and the most likely one."""
    rare = (scores.softmax(dim=-1) < least) & (scores < scores.amax(dim=-1, keepdim=True))
    return scores.masked_fill(rare, -math.inf)


def _entropy(scores: Tensor) -> Tensor:
    logs = scores.log_softmax(dim=-1)
    return -(logs * logs.exp()).nansum(dim=-1, keepdim=True)
