"""Launched steps whose tokens the host has not read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from compiled_llm.execution.batch import StepOutput
from compiled_llm.execution.state.staging import Readback, Readbacks
from compiled_llm.kvcache.row import Row


class Unread:
    """Launched steps of one loop whose tokens have not been read, oldest first."""

    def __init__(self, readbacks: Readbacks) -> None:
        self._readbacks = readbacks
        self._steps: deque[list[tuple[Sequence[Row], Readback]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def launched(self, step: StepOutput, unsampled: int) -> None:
        """Add a step, ``unsampled`` of whose rows, which may be all, get their tokens from ``sampled``."""
        self._steps.append([] if unsampled == len(step.rows) else [self._arriving(step)])

    def sampled(self, step: StepOutput) -> None:
        """Add deferred tokens to the step that was launched last."""
        self._steps[-1].append(self._arriving(step))

    def _arriving(self, step: StepOutput) -> tuple[Sequence[Row], Readback]:
        return step.rows, self._readbacks.start(step.tokens)

    def read(self) -> dict[Row, int]:
        """Return the tokens of the oldest step, waiting for them."""
        tokens: dict[Row, int] = {}
        for rows, readback in self._steps.popleft():
            tokens.update(zip(rows, readback.result(), strict=True))
        return tokens

    def forget(self) -> None:
        self._steps.clear()
