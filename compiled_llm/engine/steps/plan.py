"""What runs in one step: requests that go on by a token, and chunks of others' prompts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_llm.engine.steps.request import Request


class Chunk(NamedTuple):
    """Tokens of a prompt that run in one step.

    Attributes:
        request: whose they are.
        ids: ``[Q]`` int64.
        is_last: whether they are the last ones, and a token is sampled after them.
        scored: whether log-probabilities of the prompt are computed with them, in a launch of their own.
    """

    request: Request
    ids: NDArray[np.int64]
    is_last: bool
    scored: bool = False


class StepPlan(NamedTuple):
    """What runs in one step; no request is in it twice.

    Attributes:
        decode: requests that go on by a token.
        extend: chunks of others' prompts; those that are scored come last.
    """

    decode: list[Request]
    extend: list[Chunk]

    @property
    def sampled(self) -> list[Request]:
        """The requests that a token is sampled for, in the order in which a step returns them."""
        if not self.extend:
            return self.decode
        return [*self.decode, *(chunk.request for chunk in self.extend if chunk.is_last)]
