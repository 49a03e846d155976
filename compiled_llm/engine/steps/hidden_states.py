"""Hidden states of a request's tokens, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class ChosenLayers(NamedTuple):
    """The layers whose hidden states a request wants.

    Attributes:
        numbers: of each as the user has named it, the number that steps give it: 0 for the embeddings.
        hidden_size: of the model.
        dtype: of the model.
    """

    numbers: Mapping[int, int]
    hidden_size: int
    dtype: torch.dtype


class HiddenStates:
    """The hidden states of a request's tokens, from the first on.

    Attributes:
        layers: those that are kept.
        tokens: how many tokens have them.
    """

    def __init__(self, layers: ChosenLayers) -> None:
        """Begin without tokens."""
        self.layers = layers
        self.tokens = 0
        self._parts: dict[int, list[Tensor]] = {number: [] for number in layers.numbers.values()}

    def append(self, first: int, emitted: Mapping[int, Tensor]) -> None:
        """Keep those of the tokens from position ``first`` on, ``[n, hidden]`` each.

        Tokens that have some already were computed again. A gap cannot be: a request computes all that it has none of.
        """
        start = self.tokens - first
        assert start >= 0, "tokens are computed one after the other"
        for number, parts in self._parts.items():
            parts.append(emitted[number][start:].clone())  # a view would keep those of other rows
        self.tokens = max(self.tokens, first + len(next(iter(emitted.values()))))

    def of_first(self, tokens: int) -> dict[int, Tensor]:
        """Return those of at most the first ``tokens``, ``[tokens, hidden]`` by layer, as the user has named it."""
        none = torch.empty(0, self.layers.hidden_size, dtype=self.layers.dtype, device="cpu")
        whole = {number: torch.cat(parts)[:tokens] if parts else none for number, parts in self._parts.items()}
        return {asked: whole[number] for asked, number in self.layers.numbers.items()}
