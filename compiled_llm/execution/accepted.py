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
    """The tokens of rows that a launched step has grown by q each, which are bounds until this is read.

    Attributes:
        offered: how many guesses each row had, once this is read.
        right: how many of them count.
    """

    offered: Sequence[int] = ()
    right: Sequence[int] = ()

    def __init__(
        self, rows: Sequence[Row], new_tokens: int, arriving: Readback, give_back: Callable[[int], None]
    ) -> None:
        """Note it in the rows; ``give_back`` is told by how many tokens each of them shrinks at least."""
        self.rows, self.new_tokens = rows, new_tokens
        self._arriving, self._give_back = arriving, give_back
        self._tokens: NDArray[np.int64] | None = None
        for row in rows:  # no call for each: there may be hundreds
            row.speculation.unread += (self,)

    @property
    def arrived(self) -> bool:
        """Whether reading surely waits for nothing."""
        return self._tokens is not None or self._arriving.arrived

    def sync(self) -> None:
        """Let the rows shrink by the tokens that do not count, waiting for this step."""
        if self.right:
            return
        if self._tokens is None:  # ``[B, q]``, in each row those that count first
            self._tokens = self._arriving.array().reshape(len(self.rows), self.new_tokens)
        # The first one counts, whatever it is.
        guessed = self._tokens[:, 1:]
        right = (guessed >= _SAMPLED).sum(axis=1)
        self.offered = (guessed >= _OFFERED).sum(axis=1).tolist()
        with deferred():
            reject(self, self.rows, (1 + right).tolist())
            self.right = right.tolist()
        if (fewest := self.new_tokens - 1 - max(self.right)) > 0:
            self._give_back(fewest)

    def result(self) -> list[list[int]]:
        """Return the tokens of each row that count, and ``sync``."""
        if not self.right:
            self.sync()
        assert self._tokens is not None, "they were read"
        return [row[: 1 + count] for row, count in zip(self._tokens.tolist(), self.right, strict=True)]
