"""The result of a step of several known tokens a row, of which the device decides how many count."""

# Shapes: B rows, q new tokens of each.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.execution.state.staging import Readback
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kvcache.row import Row, reject


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
        for row in self._rows:
            row.speculation.grow(self)

    def counts(self) -> NDArray[np.int64]:
        """Return ``[B]``, how many tokens of each row count, waiting for this step."""
        if self._counts is None:
            self._counts = self._arriving.array()
        return self._counts

    def sync(self) -> None:
        """Let its rows shrink by the tokens that do not count, waiting for this step."""
        counts = self.counts().tolist()
        with deferred():
            reject(self, self._rows, counts)

    def read(self) -> dict[Row, list[int]]:
        """Return the tokens sampled after each that counts, once, and ``sync``."""
        self.sync()
        sampled = self._sampled.array().reshape(-1, self.new_tokens)
        return {row: own[:count].tolist() for row, count, own in zip(self._rows, self.counts(), sampled, strict=True)}
