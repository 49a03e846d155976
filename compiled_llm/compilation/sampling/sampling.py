"""Samples the next token inside the graph, with settings and random numbers for each row."""

# A draw is a race: of competitors with exponential random numbers, the one whose number divided by its probability is
# the smallest wins, first among tiles of neighbouring tokens, then among the tokens of that tile. The numbers come from
# a counter-based generator keyed by the row's seed and counted by the position and the token. So a replayed graph draws
# with other numbers each step (positions advance in the graph), and a row draws the same tokens whatever other rows are
# in its batch: logits that are rounded otherwise there change a draw only if two are nearly level.
# Shapes: B rows, V vocabulary, X rows with settings of their own.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.sampling.bias import ALWAYS, NO_BIASES
from compiled_llm.requests.sampling_params import SamplingNumbers
from compiled_llm_ops import (
    BIASED,
    CLEANED,
    COUNTED,
    DEFERRED,
    FOLLOWING,
    MASKED,
    NOT_A_TOKEN as NOT_A_TOKEN,
    sample_tokens,
)
from compiled_llm_ops.sampling.sampling import NUMBERS as NUMBERS_OF_OP, SampleTokens, wide_shapes

_NO_TOKENS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class Sampling(SamplingNumbers):
    """The settings by which one row's tokens are sampled.

    Attributes:
        cleaned: NaN becomes 0 and infinities become finite.
        seed: decides the row's draws.
        seen: ``[n]`` int64, tokens of the prompt that count as seen.
        output_ids: ``[n]`` int64, tokens that the answer has already.
        biases: ``[4 + F, n]`` int32, packed, at most ``MAX_BIASES``.
        start: position of the answer's first token, from which on the steps of biases count.
        tail: ``[n]`` int64, the tokens before it that biases may look at; read when the row comes in, if there are
            such biases (``followed``).
        mask: ``[words]`` int32, a bit for each token, the lowest first: 0 forbids it; None for all tokens.
        deferred: its token is sampled by a launch of its own, once the host has seen the tokens before it.
    """

    cleaned: bool = False
    seed: int = 0
    seen: NDArray[np.int64] = field(default_factory=lambda: _NO_TOKENS)
    output_ids: NDArray[np.int64] = field(default_factory=lambda: _NO_TOKENS)
    biases: NDArray[np.int32] = field(default_factory=lambda: NO_BIASES)
    start: int = 0
    tail: NDArray[np.int64] = field(default_factory=lambda: _NO_TOKENS)
    mask: NDArray[np.int32] | None = None
    deferred: bool = False

    @property
    def counts(self) -> bool:
        """Whether it matters how often the row has seen which token."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def followed(self) -> int:
        """How many tokens before the sampled one biases look at."""
        return len(self.biases) - 4

    @property
    def forgets(self) -> bool:
        """Whether it does not matter which tokens the row has seen."""
        return not (self.counts or self.followed or self.deferred)

    @property
    def adjustments(self) -> int:
        """Which tables a row uses, as ``sample_tokens`` reads it."""
        kinds = COUNTED * self.counts + MASKED * (self.mask is not None) + CLEANED * self.cleaned
        return int(kinds + FOLLOWING * self.followed + DEFERRED * self.deferred + BIASED * self.biases.shape[1])

    def starting_at(self, position: int) -> Sampling:
        """Return the same for an answer whose first token has this position."""
        return self if self._starts_anywhere or self.start == position else replace(self, start=position)

    @cached_property
    def _starts_anywhere(self) -> bool:
        """Whether no step differs from another, and no position of an answer from another."""
        if self.followed:
            return False
        first, end = self.biases[2:4]
        return not self.biases.size or bool((first == 0).all() and (end == ALWAYS).all())


NUMBERS = {**NUMBERS_OF_OP, "seed": torch.int64}
"""The attributes of ``Sampling`` that are one number a row, and what they are on the device."""


class SamplingTables(NamedTuple):
    """The slots' tables on the device, float32 where nothing else is said.

    The last of X entries is that of padding rows, which may be several: it has no adjustments, so that no table with
    more than a number is read or written for it (``wide_shapes`` says which is when).

    Attributes:
        next_token: ``[X]`` int64, the last sampled token, the row's next input.
        seed: ``[X]`` int64.
        numbers: ``[X]`` each, those of the op, in its order.
        counts: twice how often the answer has a token, and 1 more if the prompt has it.
        allowed: a bit for each token.
        biases: packed, their steps as positions.
        recent: the latest tokens, at their positions modulo ``MAX_FOLLOWED + 1``.
    """

    next_token: Tensor
    seed: Tensor
    numbers: tuple[Tensor, ...]
    counts: Tensor
    allowed: Tensor
    biases: Tensor
    recent: Tensor

    @classmethod
    def drawing(cls, vocabulary: int, device: torch.device) -> SamplingTables:
        """Allocate tables of one entry, that draws among all tokens."""
        own = Sampling()
        columns = {
            name: torch.full((1,), getattr(own, name), dtype=dtype, device=device) for name, dtype in NUMBERS.items()
        }
        columns["next_token"] = torch.zeros(1, dtype=torch.int64, device=device)
        return cls.of(columns, wide_tables(1, vocabulary, device))

    @classmethod
    def of(cls, columns: Mapping[str, Tensor], wide: Mapping[str, Tensor]) -> SamplingTables:
        """Return the tables; ``columns`` are ``next_token`` and ``NUMBERS``, by name."""
        numbers = tuple(columns[name] for name in NUMBERS_OF_OP)
        return cls(columns["next_token"], columns["seed"], numbers, **wide)

    def arguments(
        self,
        logits: Tensor,
        seeds: Tensor,
        slots: Tensor,
        positions: Tensor,
        deferred: bool = False,
        before: Tensor | None = None,
    ) -> SampleTokens:
        wide = (self.counts, self.allowed, self.biases, self.recent)
        return SampleTokens._make((logits, seeds, slots, positions, *self.numbers, *wide, deferred, before))


def wide_tables(entries: int, vocabulary: int, device: torch.device) -> dict[str, Tensor]:
    """Return zeros for the tables that have more than a number a row."""
    shapes = wide_shapes(entries, vocabulary).items()
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes}


GREEDY = Sampling(temperature=0.0)


def sample(logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables, deferred: bool = False) -> Tensor:
    """Sample each row's next token of logits ``[B, V]``, store it in its slot, and count and remember it.

    Args:
        slots: ``[B]`` int64, each row's entry in ``tables``.
        positions: ``[B]`` int64, the position of the sampled token.
        deferred: whether to sample the deferred rows or all others; rows of both kinds may be there if it is False.

    Returns:
        ``[B]`` int64; ``NOT_A_TOKEN`` for a row of the other kind, whose slot keeps any token until its own is sampled,
            and for one that is drawn and whose logits are NaN, +inf or all -inf.
    """
    sampled = sample_with_seeds(tables.seed[slots], logits, slots, positions, tables, deferred)
    tables.next_token.index_put_((slots,), sampled.clamp(min=0))
    return sampled


def sample_with_seeds(
    seeds: Tensor, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables, deferred: bool = False
) -> Tensor:
    """Sample each row's next token with these seeds, ``[B]`` int64, and do not store it; otherwise as ``sample``."""
    return sample_tokens(*tables.arguments(logits, seeds, slots, positions, deferred))
