"""The pattern of a HuggingFace mask function, found by calling it at positions that tell patterns apart."""

# Shapes: N positions of the model.

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether queries see keys: of a batch, a head, query positions and key positions, all ``[1, 1, Q, N]``, broadcast."""


class PatternError(ValueError):
    """A mask function is neither causal nor a causal window; the message says where it differs."""


def window_of(function: MaskFunction, positions: int, device: torch.device | str = "cpu") -> int | None:
    """Return how many tokens a query sees, itself included, None if all before it; PatternError for other patterns."""
    # Patterns that begin to differ after the last of N ``positions`` are equal.
    keys = torch.arange(positions, device=device)

    def seen(query: int) -> Tensor:
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        return function(zero, zero, zero + query, keys[None, None, None]).expand(1, 1, 1, positions)[0, 0, 0]

    last = positions - 1
    window = max(1, int(seen(last).sum()))
    first = positions - window
    borders = {0, 1, window - 1, window, window + 1, first - 1, first, first + 1, last // 2, last - 1, last}
    for query in sorted(borders & set(range(positions))):
        wrong = seen(query) != (keys <= query) & (keys > query - window)
        if wrong.any():
            raise PatternError(_place(query, int(wrong.int().argmax())))
    return None if window == positions else window


def _place(query: int, key: int) -> str:
    return f"the query at {query} and the key at {key}"
