"""Where the log-probabilities of one request's tokens are."""

from __future__ import annotations

from collections.abc import Iterator

from compiled_llm.compilation.logprobs import ScoredTokens


class Scores:
    """Of each token, what one step has computed of many rows, and which of those it is.

    Two lists side by side: an object for each token would be one that the garbage collector looks at, of millions, and
    a full collection stops the loop for tenths of a second.
    """

    __slots__ = ("_rows", "_steps")

    def __init__(self) -> None:
        """Begin with no token's."""
        self._steps: list[ScoredTokens] = []
        self._rows: list[int] = []

    def append(self, step: ScoredTokens, row: int) -> None:
        """Know where the next token's are."""
        self._steps.append(step)
        self._rows.append(row)  # last: other threads read as many as there are rows

    def extend(self, step: ScoredTokens, rows: range) -> None:
        """Know where those of the next tokens are, which one step has computed."""
        self._steps += [step] * len(rows)
        self._rows += rows

    def __len__(self) -> int:
        """Of how many tokens they are known."""
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[ScoredTokens, int]:
        """Return where one token's are."""
        return self._steps[index], self._rows[index]

    def between(self, start: int, end: int) -> Iterator[tuple[ScoredTokens, int]]:
        """Yield where those of some tokens are."""
        return zip(self._steps[start:end], self._rows[start:end], strict=False)
