"""What steps emit of a request's tokens besides logits, on the host: hidden states, and what traced hooks emit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_llm.compilation.graphs.outputs import Emitted


class WantedEmitted(NamedTuple):
    """What a request wants of its tokens besides logits.

    Attributes:
        layers: of each layer as the user has named it, the number that steps give it: 0 for the embeddings; None if
            hidden states are not wanted.
        names: of what traced hooks emit; None if it is not wanted.
        hidden_size: of the model.
        dtype: of the model.
    """

    layers: Mapping[int, int] | None
    names: Sequence[str] | None
    hidden_size: int
    dtype: torch.dtype

    @property
    def keys(self) -> set[int | str]:
        """Under which steps emit it."""
        return {*(self.layers or {}).values(), *(self.names or ())}

    @property
    def token_bytes(self) -> int:
        """What the hidden states of a token take; of what hooks emit that is known once they have run."""
        return len(set((self.layers or {}).values())) * self.hidden_size * self.dtype.itemsize


class RequestEmitted:
    """What steps have emitted of a request's tokens, from the first on.

    Attributes:
        wanted: what is kept.
        tokens: how many tokens have it.
    """

    def __init__(self, wanted: WantedEmitted) -> None:
        """Begin without tokens."""
        self.wanted = wanted
        self.tokens = 0
        self._parts: dict[int | str, list[Tensor]] = {key: [] for key in wanted.keys}

    def append(self, first: int, emitted: Emitted) -> None:
        """Keep that of the tokens from position ``first`` on, ``[n, ...]`` each.

        Tokens that have it already were computed again. A gap cannot be: a request computes all that it has none of.
        """
        start = self.tokens - first
        assert start >= 0, "tokens are computed one after the other"
        for key, parts in self._parts.items():
            parts.append(emitted[key][start:].clone())  # a view would keep those of other rows
        self.tokens = max(self.tokens, first + len(next(iter(emitted.values()))))

    def hidden_states(self, tokens: int) -> dict[int, Tensor] | None:
        """Return those of at most the first ``tokens``, ``[tokens, hidden]`` by layer, as the user has named it."""
        if self.wanted.layers is None:
            return None
        none = torch.empty(0, self.wanted.hidden_size, dtype=self.wanted.dtype, device="cpu")
        of_number = {number: self._first(number, tokens, none) for number in self.wanted.layers.values()}
        return {asked: of_number[number] for asked, number in self.wanted.layers.items()}

    def by_name(self, tokens: int) -> dict[str, Tensor] | None:
        """Return what hooks have emitted of at most the first ``tokens``, ``[tokens, ...]`` each."""
        if self.wanted.names is None:
            return None
        return {name: self._first(name, tokens, torch.empty(0, device="cpu")) for name in self.wanted.names}

    def _first(self, key: int | str, tokens: int, none: Tensor) -> Tensor:
        parts = self._parts[key]
        return torch.cat(parts)[:tokens] if parts else none
