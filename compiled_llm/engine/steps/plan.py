"""The requests and chunks of prompts that run in one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.engine.steps.request import Request
from compiled_llm.execution.batch import Extension
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.model_runner import ModelRunner


class RunsApart(Protocol):
    """Who computes chunks of a request in launches of their own."""

    timed: bool  # whether the time that a launch takes tells how long others take
    together: bool = False  # whether it takes chunks that follow one another in a plan at once; else each alone

    @property
    def end(self) -> int | None:
        """Where a chunk ends that it takes whole, however little room there is; None for as much as there is."""
        return None

    def run(
        self,
        model_runner: ModelRunner,
        persistent: PersistentBatch,
        extensions: Sequence[Extension],
        taps: Sequence[Any],
    ) -> Tensor:
        """Compute chunks that it runs in a plan, in the model's executor; return the tokens sampled after them."""
        # ``[N]`` int64, of N chunks that end a prompt, in their order.
        ...


class Chunk(NamedTuple):
    """Tokens of a prompt that run in one step."""

    request: Request
    ids: NDArray[np.int64]  # ``[Q]`` int64
    is_last: bool  # a token is sampled after them
    # who computes them apart: what one of its request's parts says; None for steps
    apart: RunsApart | None = None

    @property
    def timed(self) -> bool:
        """Whether the time that it takes tells how long others take."""
        return self.apart is None or self.apart.timed

    def extension(self, model_runner: ModelRunner) -> Extension:
        """Return it as batches have it; called in the model's executor."""
        row, parts = self.request.running_row, () if self.apart is not None else self.request.parts.values()
        made = (part.extension(row, self.ids, self.is_last, model_runner) for part in parts)
        found = next((extension for extension in made if extension is not None), None)
        return Extension.of(row, self.ids, self.is_last) if found is None else found


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
