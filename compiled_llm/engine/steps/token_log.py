"""The tokens of steps that sample for the same requests: the list of a step is kept once, for all of them."""

from __future__ import annotations

from collections.abc import Iterable

from compiled_llm.compat.forks import lock
from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN

_reading = lock()


class TokenLog:
    """The lists of tokens of steps, in each of which a request has the same place; one thread adds, any may read."""

    def __init__(self, stop_token_ids: Iterable[frozenset[int]]) -> None:
        """Begin without steps; at these tokens, a request may end."""
        self.steps: list[list[int]] = []
        self._stop_token_ids = frozenset[int]().union(*stop_token_ids)

    def take(self, tokens: list[int]) -> bool:
        """Add the tokens of a step, unless a request may end with one, so that each has to be looked at."""
        if NOT_A_TOKEN in tokens or not self._stop_token_ids.isdisjoint(tokens):
            return False
        self.steps.append(tokens)
        return True

    def read(self, tokens: list[int], place: int, start: int) -> None:
        """Add what the request at a place lacks to the tokens that it has, ``start`` of which are not of the log."""
        # How many it has says what it lacks, also to the next one if this one is interrupted. Mostly it is one token.
        steps = self.steps
        if len(tokens) - start < len(steps):
            with _reading:
                while (at := len(tokens) - start) < len(steps):
                    tokens.append(steps[at][place])
