"""The op that samples the next tokens, and what its filters keep."""

# Shapes: B rows, R of them, V vocabulary, X entries of the tables of settings.

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm_ops.contracts.sampling import MAX_BIASES, MAX_FOLLOWED
from compiled_llm_ops.library import define_op

NOT_A_TOKEN = -1
"""Stands for the next token of a row that is to be drawn from logits that are NaN, +inf or all -inf: none can be."""

# So many of the most likely tokens are searched for a nucleus before the whole vocabulary is sorted.
_LIKELY = 1024


class SampleTokens(NamedTuple):
    """The arguments of ``sample_tokens``."""

    logits: Tensor
    seeds: Tensor
    slots: Tensor
    positions: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    adjustments: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    counts: Tensor
    allowed: Tensor
    biases: Tensor
    recent: Tensor
    deferred: bool = False
    before: Tensor | None = None


NUMBERS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "adjustments": torch.int32,
    "repetition_penalty": torch.float32,
    "presence_penalty": torch.float32,
    "frequency_penalty": torch.float32,
}
"""The arguments that are a number an entry, as they stand one after the other, and their dtypes."""


def wide_shapes(entries: int, vocabulary: int) -> dict[str, tuple[list[int], torch.dtype]]:
    """Return the shape and dtype of each table with more than a number an entry.

    What a row's ``adjustments`` do not ask for is neither read nor written, whatever lies there: ``counts`` is for
    COUNTED, ``allowed`` for MASKED, ``biases`` for BIASED, as many columns as there are biases, and ``recent`` for
    FOLLOWING. So an entry that no row has may hold anything, and so may columns behind an entry's last bias.
    """
    return {
        "counts": ([entries, vocabulary], torch.int16),
        "allowed": ([entries, -(-vocabulary // 32)], torch.int32),
        "biases": ([entries, 4 + MAX_FOLLOWED, MAX_BIASES], torch.int32),
        "recent": ([entries, MAX_FOLLOWED + 1], torch.int32),
    }


@define_op(SampleTokens, writes=("counts", "recent"))
def sample_tokens(args: SampleTokens) -> Tensor:
    """Sample each row's next token, and count and remember it.

    A row that is ``DEFERRED`` is left out, and so is every other one if ``deferred``: its tables are not written.

    Biases, repetition penalty, frequency and presence penalty, infinities, mask; temperature, top-k, top-p and min-p,
    each over the tokens that the one before has left: in this order. Tokens as likely as the last that is kept are kept
    too, and the most likely one always is. The result depends on the arguments alone. Of a row without logit
    adjustments, no table beyond ``adjustments`` is touched.

    Args:
        logits: ``[B, V]`` of any floating dtype, computed with in float32, with any stride between rows.
        seeds: ``[B]`` int64, not negative: with the position it decides the row's random numbers.
        slots: ``[B]`` int64, each row's entry in the tables; several rows may have one whose adjustments are 0.
        positions: ``[B]`` int64, the position of the sampled token, which decides the biases; not negative.
        temperature: ``[X]`` float32, divides; 0.0 takes the most likely token, the first of several, as ``argmax``
            does: of +inf as well, before that of NaN, and the first one if all are -inf.
        top_k: ``[X]`` int32, keep the k largest; 0 keeps all.
        top_p: ``[X]`` float32, keep the fewest of the largest ones whose probability reaches p; 1.0 keeps all.
        min_p: ``[X]`` float32, keep those at least p times as probable as the most probable; 0.0 keeps all.
        adjustments: ``[X]`` int32, flags of logit adjustments before the temperature: ``COUNTED`` for penalties,
            ``MASKED`` for ``allowed``, ``CLEANED`` if NaN becomes 0 and infinities become finite, ``BIASED`` for each
            bias, and ``FOLLOWING`` for each token that the bias which looks back furthest looks at. ``DEFERRED``
            changes no logits.
        repetition_penalty: ``[X]`` float32, divides positive logits of tokens that were counted or are in the prompt,
            and multiplies negative ones; 1.0 for none.
        presence_penalty: ``[X]`` float32, subtracted for tokens that were counted.
        frequency_penalty: ``[X]`` float32, subtracted for each time that a token was counted.
        counts: ``[X, V]`` int16, written: twice how often a token was sampled, and 1 more if the prompt has it.
        allowed: ``[X, ceil(V / 32)]`` int32, a bit for each token, the lowest first: 0 forbids it.
        biases: ``[X, 4 + MAX_FOLLOWED, MAX_BIASES]`` int32: tokens in ascending order; what is added to their logits,
            the bits of a float32; the first position at which it is, and the one at which it no longer is; the token
            that has to stand before it, and the one before that, and so on, or -1 for any.
        recent: ``[X, MAX_FOLLOWED + 1]`` int32, written: the row's token at each position modulo that number, or -1.
        deferred: sample the rows that are ``DEFERRED``, in place of all others.
        before: ``[B, n]`` int64, tokens that stand before the sampled one and that the tables lack, the latest first,
            -1 for none; n is at most ``MAX_FOLLOWED``. Penalties and biases see them. No sampled token is counted or
            remembered then, and several rows may have one slot. None if the tables have all.

    Returns:
        ``[B]`` int64; ``NOT_A_TOKEN`` for a row that is left out, and for one that is drawn and whose logits are NaN,
        +inf or all -inf.

    Raises:
        ValueError: shapes or dtypes do not fit together.

    Source:
        Order and sets are those of transformers' logits processors; presence and frequency penalty are those of
        OpenAI's API. Top-p: https://arxiv.org/abs/1904.09751, min-p: https://arxiv.org/abs/2407.01082. On CUDA
        ``sampling.kernels.sampling``.
    """
    return args.logits.new_empty(args.logits.shape[0], dtype=torch.int64)


class Filters(NamedTuple):
    """The filters of rows."""

    top_k: Tensor  # ``[R]`` integers; 0, or V and more, for all
    top_p: Tensor  # ``[R]`` float32; 1.0 for all
    min_p: Tensor  # ``[R]`` float32; 0.0 for all

    @classmethod
    def of(cls, args: SampleTokens, slots: Tensor) -> Filters:
        """Return those of the rows with these slots ``[R]``."""
        return cls(*(getattr(args, name)[slots] for name in cls._fields))


def filtered(scores: Tensor, filters: Filters) -> Tensor:
    """Return float32 scores ``[R, V]``, -inf for tokens that ``sample_tokens`` does not draw; without waiting."""
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


def smallest_kept(scores: Tensor, filters: Filters) -> Tensor:
    """Return ``[B]`` float32, the scores of ``[B, V]`` from which on a row's tokens are kept; -inf where all are."""
    top_k, top_p, min_p = filters
    smallest = scores.new_full(top_k.shape, -math.inf)
    limited, nucleus = (top_k > 0) & (top_k < scores.shape[1]), top_p < 1
    most = 0
    if bool(limited.any()):
        most = int(top_k[limited].max())
        kth = scores.topk(most).values.gather(1, (top_k.long() - 1).clamp(0, most - 1)[:, None])
        smallest = torch.where(limited, kth[:, 0], smallest)
    if bool(nucleus.any()):
        likely = most if bool(limited[nucleus].all()) else max(most, _LIKELY)
        smallest = torch.where(nucleus, _nucleus(scores, smallest, top_p, likely), smallest)
    if bool((min_p > 0).any()):
        smallest = smallest.maximum(scores.amax(dim=-1) + min_p.log())
    return smallest


def _nucleus(scores: Tensor, smallest: Tensor, top_p: Tensor, likely: int) -> Tensor:
    """Return ``[B]``, the largest score that together with all larger ones has top-p of the tokens kept so far."""
    kept = (scores - scores.amax(dim=-1, keepdim=True)).exp_().masked_fill_(scores < smallest[:, None], 0)
    needed = kept.sum(dim=-1, dtype=torch.float64) * top_p.double()
    likely = min(likely, scores.shape[1])
    largest, order = scores.topk(likely)
    short = (kept.gather(1, order).cumsum(dim=-1, dtype=torch.float64) < needed[:, None]).sum(dim=-1)
    # Only more tokens as likely as the last of the top-k reach it, or many tokens in rows without top-k.
    found = largest.gather(1, short.clamp(max=likely - 1)[:, None])[:, 0].maximum(smallest)
    missing = (short == likely) & (found > smallest) & (top_p < 1)
    if likely < scores.shape[1] and bool(missing.any()):
        return _nucleus(scores, smallest, top_p, scores.shape[1])
    return found
