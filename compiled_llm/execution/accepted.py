"""The tokens of a step that feeds in guesses, on the way to the host: the device has decided how many of them count."""

# Shapes: B rows, q new tokens of each.

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from compiled_llm.execution.state.staging import Readback
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kvcache.row import Row, reject

_SAMPLED, _OFFERED = -1, -2
"""The least numbers that say what was sampled, and that a guess was made which does not count; lower ones, that none
was."""


class AcceptedTokens:
    """The tokens of rows that a launched step has grown by q each, which are bounds until this is read."""

    def __init__(
        self, rows: Sequence[Row], new_tokens: int, arriving: Readback, give_back: Callable[[int], None]
    ) -> None:
        """Note it in the rows; ``give_back`` is told by how many tokens each of them shrinks at least."""
        self.rows, self.new_tokens = rows, new_tokens
        self._arriving, self._give_back = arriving, give_back
        self._tokens: NDArray[np.int64] | None = None
        self._counts: list[int] = []
        self.offered: list[int] = []  # how many guesses each row had, once this is read
        for row in rows:
            row.speculation.grow(self)

    @property
    def arrived(self) -> bool:
        """Whether reading surely waits for nothing."""
        return self._tokens is not None or self._arriving.arrived

    def tokens(self) -> NDArray[np.int64]:
        """Return ``[B, q]``, in each row those that count first, waiting for this step."""
        if self._tokens is None:
            self._tokens = self._arriving.array().reshape(len(self.rows), self.new_tokens)
        return self._tokens

    def sync(self) -> None:
        """Let the rows shrink by the tokens that do not count, waiting for this step."""
        if self._counts:
            return
        # The first one counts, whatever it is.
        tokens = self.tokens()
        guessed = tokens[:, 1:]
        self._counts = (1 + (guessed >= _SAMPLED).sum(axis=1)).tolist()
        self.offered = (guessed >= _OFFERED).sum(axis=1).tolist()
        with deferred():
            reject(self, self.rows, self._counts)
        if (fewest := self.new_tokens - max(self._counts)) > 0:
            self._give_back(fewest)

    def result(self) -> list[list[int]]:
        """Return the tokens of each row that count, and ``sync``."""
        self.sync()
        return [row[:count] for row, count in zip(self.tokens().tolist(), self._counts, strict=True)]
