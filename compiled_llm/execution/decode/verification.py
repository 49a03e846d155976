"""The result of a step of several known tokens a row, of which the device decides how many count."""

# Shapes: B rows, q new tokens of each.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.execution.state.staging import Readback
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kvcache.row import Row


class Verification:
    """The numbers of each row's tokens that count, and what was sampled after them, on the way to the host."""

    # ``next_tokens`` is ``[B]`` int64 on the device, the token that each row goes on with.

    def __init__(
        self, rows: Sequence[Row], new_tokens: int, next_tokens: Tensor, counts: Readback, sampled: Readback
    ) -> None:
        """Let the lengths of ``rows``, grown by q tokens, be upper bounds until ``counts`` ``[B]`` are read."""
        self.next_tokens, self.new_tokens = next_tokens, new_tokens
        self._rows, self._arriving, self._sampled = list(rows), counts, sampled
        self._counts: NDArray[np.int64] | None = None
        for at, row in enumerate(self._rows):
            row.unread.append(_CountOfRow(self, at))

    @property
    def known(self) -> bool:
        return self._counts is not None

    def counts(self) -> NDArray[np.int64]:
        """Return ``[B]``, how many tokens of each row count, waiting for this step."""
        if self._counts is None:
            self._counts = self._arriving.array()
        return self._counts

    def read(self) -> dict[Row, list[int]]:
        """Return the tokens sampled after each that counts, once, waiting for this step; lengths are exact then."""
        counts, sampled = self.counts(), self._sampled.array().reshape(-1, self.new_tokens)
        with deferred():
            for row in self._rows:
                row.learn()
        return {row: own[:count].tolist() for row, count, own in zip(self._rows, counts, sampled, strict=True)}


class _CountOfRow(NamedTuple):
    """A ``TokenCount``."""

    verification: Verification
    at: int

    @property
    def known(self) -> bool:
        return self.verification.known

    def uncounted(self) -> int:
        return self.verification.new_tokens - int(self.verification.counts()[self.at])
