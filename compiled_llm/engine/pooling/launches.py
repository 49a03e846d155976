"""Launches of prompts that end at their last token, all of one plan together, and what they give on its way."""

# Such a launch gives no logits, so requests that draw tokens cannot be in it.

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from compiled_llm.compilation.inputs import Pooling
from compiled_llm.engine.request_part import RequestPart
from compiled_llm.engine.steps.plan import RunsApart, StepPlan
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.engine.steps.taps import EngineTap, PlanTap
from compiled_llm.execution.batch import Batch, Extension
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.staging import Readback
from compiled_llm.kvcache.row import Row
from compiled_llm.requests.columns import ReadAnswer, encoded

if TYPE_CHECKING:
    from msgspec import Raw


class PooledLaunches(RunsApart):
    """What runs the chunks of all prompts that are pooled in one way."""

    timed = True  # they take about as long as others
    together = True

    def __init__(self, pooling: Pooling) -> None:
        self._pooling: Pooling = pooling

    def run(
        self,
        model_runner: ModelRunner,
        persistent: PersistentBatch,
        extensions: Sequence[Extension],
        taps: Sequence[PlanTap],
    ) -> Tensor:
        """Run them in one batch, without waiting for it; in the model's executor."""
        output = model_runner.run(Batch(extend=extensions, pooling=self._pooling), persistent)
        if output.rows and output.logits is not None:
            (watch,) = (tap for tap in taps if isinstance(tap, PooledWatch))
            watch.await_vectors(output.rows, output.logits, model_runner)
        return output.tokens


STATES, SCORES = PooledLaunches("state"), PooledLaunches("scores")


NAME = "pooling"
"""By which a request has its ``RequestPooled``."""


class RequestPooled(RequestPart):
    """What a request gets in place of an answer: ``vector``, float32, once it has ended well."""

    def __init__(self, launches: PooledLaunches) -> None:
        self.launches = launches
        self.vector: array[float] | None = None

    def runs_apart(self, start: int) -> PooledLaunches:
        return self.launches

    def completion(self, answer: ReadAnswer) -> Mapping[str, Any]:
        return {"pooled": self.vector if answer.finish_reason == "length" else None}

    def pieces(self, answer: ReadAnswer) -> Iterator[Raw | None]:
        while not answer.done:
            yield None
        if (vector := self.completion(answer)["pooled"]) is not None:
            yield encoded(vector.tobytes())


class ArrivingVectors(NamedTuple):
    """The vectors of some requests on their way to the host."""

    requests: Sequence[Request]
    readback: Readback

    def hand_out(self) -> Mapping[Request, RequestError]:
        """Give each its own."""
        numbers = self.readback.array().reshape(len(self.requests), -1)
        for request, vector in zip(self.requests, numbers, strict=True):
            request.part(NAME).vector = array("f", vector.tobytes())
        return {}


class PooledWatch(PlanTap):
    """A watcher of the launches of one plan that give vectors."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__()
        self._requests = {chunk.request.running_row: chunk.request for chunk in plan.extend}

    def await_vectors(self, rows: Sequence[Row], vectors: Tensor, model_runner: ModelRunner) -> None:
        """Start to copy ``vectors`` ``[N, W]`` of rows to the host."""
        requests = [self._requests[row] for row in rows]
        self.add(ArrivingVectors(requests, model_runner.readbacks.start_once(vectors.flatten())))


class PoolingTap(EngineTap):
    """The vectors of a loop's requests."""

    def of_plan(self, plan: StepPlan) -> PlanTap | None:
        pooled = any(isinstance(chunk.apart, PooledLaunches) for chunk in plan.extend)
        return PooledWatch(plan) if pooled else None
