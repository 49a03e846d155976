"""What gives requests something of their tokens besides them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from compiled_llm.engine.loop_settings import LoopSettings
from compiled_llm.engine.steps.plan import StepPlan
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.engine.steps.scheduler import Scheduler
from compiled_llm.execution.batch import Tap
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.features import Seams, features


class UnreadOutput(Protocol):
    """The output of a launch whose tokens have not been read."""

    def hand_out(self) -> Mapping[Request, RequestError]:
        """Give it to requests that have not ended, before their tokens; return those that end, and why."""
        ...


class PlanTap(Tap):
    """A watcher of the steps of one plan."""

    def __init__(self) -> None:
        self._arriving: list[UnreadOutput] = []

    def add(self, arriving: UnreadOutput) -> None:
        self._arriving.append(arriving)

    def taken(self) -> list[UnreadOutput]:
        """Return what was computed since the last call."""
        arriving, self._arriving = self._arriving, []
        return arriving


class EngineTap:
    """A watcher of one loop."""

    def __init__(self, model_runner: ModelRunner, scheduler: Scheduler, settings: LoopSettings) -> None:
        self.model_runner, self.scheduler, self.settings = model_runner, scheduler, settings

    @staticmethod
    def asked(**asked: object) -> Callable[[Request], None]:
        """Check what a user asks for, and return what lets a request have it; ValueError if it cannot be had."""
        raise NotImplementedError

    @staticmethod
    def check_room(asked: Iterable[Request], unfinished: Iterable[Request]) -> None:
        """Raise ValueError if memory lacks for what requests are to get."""

    @staticmethod
    def prepare(model_runner: ModelRunner) -> None:
        """Compile what no program has."""

    def of_plan(self, plan: StepPlan) -> PlanTap | None:
        """Return a watcher of a plan; None if nobody wants anything."""

    def read(self, arrived: Sequence[UnreadOutput], ended: Sequence[Request]) -> None:
        """Note what has been handed out, and the requests that have ended with it."""


class TapPart(Protocol):
    """A part that gives requests something besides tokens."""

    TAP: type[EngineTap]


TAPS = Seams[TapPart]("engine", "TAP")


def engine_taps() -> Sequence[type[EngineTap]]:
    return [part.TAP for part in features(TAPS)]
