"""An engine's loop on the model as it is placed now: made when there is something to run, and dropped for another."""

from __future__ import annotations

from compiled_llm.engine.loop_settings import LoopSettings
from compiled_llm.engine.metrics import EngineStats, stats_of
from compiled_llm.engine.model_check import ModelCheck
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.steps.request import Request


class PlacedLoop:
    """The engine's present loop; makes one after the other, in the thread that runs it."""

    def __init__(self, check: ModelCheck, settings: LoopSettings) -> None:
        self._check = check
        self.settings = settings
        self._past = EngineStats()
        self._parked: list[Request] = []  # that go on in the next loop
        # runs steps on the model as it is placed now; None before the first request, and asleep
        self.loop: Loop | None = None

    @property
    def busy(self) -> bool:
        """Whether there is something to run, now or in the next loop."""
        loop = self.loop  # another thread may drop it meanwhile
        return bool(self._parked) or (loop is not None and not loop.idle)

    def current(self) -> Loop:
        """Return the loop on the model as it is placed now; requests that run stay with theirs, and end there."""
        if self.loop is None or self.loop.idle:
            model_runner = self._check.begin()  # which lets an old one go first
            if self.loop is None or self.loop.model_runner is not model_runner:
                self.drop()
                model_runner.prefixes.clear()  # their weights are unknown
                self.loop = Loop.of(model_runner, self.settings)
                while self._parked:
                    self.loop.scheduler.add(self._parked.pop(0))
        return self.loop

    def drop(self, gives_back: bool = True) -> None:
        """Give all pages back, and drop the model runner; counts stay."""
        loop, self.loop = self.loop, None
        if loop is not None:
            self._past = stats_of(loop, 0, self._past)
            if gives_back:
                loop.close()

    def park(self) -> None:
        """Drop the loop; its requests go on in the next one. The caller holds the loop lock."""
        if self.loop is not None:
            self._parked += self.loop.scheduler.park()
            self.drop()

    def forget(self) -> None:
        """Drop the loop and give nothing back: all requests have ended."""
        self._parked.clear()
        self.loop = None

    def stats(self, waiting: int) -> EngineStats:
        return stats_of(self.loop, waiting, self._past, self._check.present)
