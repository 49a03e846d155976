"""How many tokens rows feed in next: the number by which they are expected to be fastest."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_llm.kvcache.row import Row


class Rule:
    """Always the largest of ``sizes``."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes

    def size(self, rows: Sequence[Row]) -> int:
        """Return how many tokens each row feeds in next."""
        return self._sizes[-1]

    def note(self, rows: Sequence[Row], offered: Sequence[int], accepted: Sequence[int]) -> None:
        """Note how many drafts each row of a step had, and how many counted."""
