"""The requests and chunks of prompts that run in one step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_llm.engine.steps.request import Request
from compiled_llm.execution.batch import Extension


class Chunk(NamedTuple):
    """Tokens of a prompt that run in one step."""

    request: Request
    ids: NDArray[np.int64]  # ``[Q]`` int64
    is_last: bool  # a token is sampled after them
    # who computes them in a launch of their own, by its ``run``: a request's ``scores`` or ``images``; None for steps
    apart: Any = None

    @property
    def timed(self) -> bool:
        """Whether the time that it takes tells how long others take."""
        return self.apart is None or self.apart.timed

    @property
    def extension(self) -> Extension:
        return Extension.of(self.request.running_row, self.ids, self.is_last)


class StepPlan(NamedTuple):
    """One step; no request is in it twice."""

    decode: list[Request]  # requests that go on
    extend: list[Chunk]  # chunks of others' prompts; those that run apart come last
    new_tokens: int = 1  # pages are promised for so many of each of ``decode``, all but one of which may be rejected

    @property
    def requests(self) -> list[Request]:
        """All that take part."""
        return [*self.decode, *(chunk.request for chunk in self.extend)]

    @property
    def sampled(self) -> list[Request]:
        """The requests that tokens are sampled for, in the order in which a step returns them."""
        if not self.extend:
            return self.decode
        return [*self.decode, *(chunk.request for chunk in self.extend if chunk.is_last)]
