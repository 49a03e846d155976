"""Sampled tokens: ours are drawn with random numbers of our own, so HuggingFace is made to draw the same ones.

Each has to be one that HuggingFace could have drawn, and all of them together have to be distributed as its draws are:
where each token lies in its distribution is then a uniform number, over all cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


class Draws:
    """What HuggingFace draws while a call is repeated with tokens that are given."""

    def __init__(self, tokens: Tensor, pad: int | None, seed: int) -> None:
        """Take ``[B, T]`` new tokens; what a row has after its end is not drawn."""
        ended = (tokens == pad).flip(1).cumprod(1).flip(1).bool() if pad is not None else torch.zeros_like(tokens) > 0
        self._columns = iter(zip(tokens.unbind(1), (~ended).unbind(1), strict=True))
        self._generator = torch.Generator().manual_seed(seed)
        self.impossible: list[str] = []  # what it could not have drawn
        self.places: list[float] = []  # where each token lies in its distribution, a number from 0 to 1

    def multinomial(self, probabilities: Tensor, num_samples: int, **options: Any) -> Tensor:
        """Stands in for ``torch.multinomial``; tokens that are not given are the most likely ones."""
        tokens, drawn = next(
            self._columns, (probabilities.argmax(1), torch.zeros(len(probabilities), dtype=torch.bool))
        )
        if len(tokens) != len(probabilities):
            return probabilities.argmax(1)[:, None]
        for row in drawn.nonzero()[:, 0].tolist():
            self._note(probabilities[row].double(), int(tokens[row]))
        return tokens[:, None]

    def _note(self, probabilities: Tensor, token: int) -> None:
        own, below = float(probabilities[token]), float(probabilities[:token].sum())
        if own <= 0:
            self.impossible.append(f"token {token}, which HuggingFace never draws there")
        self.places.append(below + own * float(torch.rand((), generator=self._generator)))

    @contextmanager
    def forced(self) -> Iterator[None]:
        """Inside, sampling draws these tokens."""
        with patch.object(torch, "multinomial", self.multinomial):
            yield


def unevenness(places: list[float]) -> float:
    """How unlikely it is that these are uniform numbers (Kolmogorov and Smirnov), as -log10 of the probability."""
    if not places:
        return 0.0
    values, count = torch.tensor(places, dtype=torch.float64).sort().values, len(places)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = float(torch.maximum(steps[1:] - values, values - steps[:-1]).max())
    return (2 * count * distance**2) / math.log(10) - math.log10(2)
