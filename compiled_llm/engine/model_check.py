"""Checks now and then whether the model can serve requests: to compare all of it takes longer than a step may."""

from __future__ import annotations

import logging
import math
import time
import weakref

from transformers import PreTrainedModel

from compiled_llm.engine.device_loss import DeviceLostError
from compiled_llm.engine.input_processing.input_processor import TokenFacts
from compiled_llm.execution.lifecycle.runtime import Runtime, runtime_of
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.model.inputs import in_training
from compiled_llm.model.version.model_version import Placement

logger = logging.getLogger("compiled_llm.engine")

_SECONDS = 0.1
"""Between two checks while requests run."""


class ModelCheck:
    """A check of the model when a request is submitted, and while the loop runs, which does not repeat it at once."""

    def __init__(self, model: PreTrainedModel, runtime: Runtime, watching: bool = True) -> None:
        self.lost: DeviceLostError | None = None  # why the device runs nothing more in this process; None while it does
        self.tokens = TokenFacts.of(model)  # the model's token facts at the last check
        self._watching = watching
        self._seen: weakref.ref[ModelRunner] | None = None
        self._model = model
        self._runtime = runtime
        self._checked = 0.0  # when the loop has, and at what:
        self._checked_at: tuple[weakref.ref[ModelRunner], int] | None = None
        self._submitted: tuple[float, weakref.ref[ModelRunner]] | None = None  # when a caller has, and what ran it
        self._begun: weakref.ref[ModelRunner] | None = None  # what the loop has begun with, a caller having checked it

    def obstacle(self, placement: Placement) -> str | None:
        """Return why the model, at this ``placement``, can serve no request now, with the remedy."""
        if runtime_of(self._model) is not self._runtime:
            return "the model was unwrapped; wrap it, and make another engine"
        if (reason := self._runtime.obstacle(placement)) is None:
            return None
        if (found := self._runtime.facts.version.obstacles(placement).training) is not None:
            return f"the wrapped model is {in_training(found)}"
        return f"the engine cannot run this model now ({reason.id}: {reason}). {reason.advice}"

    @property
    def present(self) -> ModelRunner | None:
        """The model runner that there is, without a check of the model; None before the first use, and asleep."""
        return self._runtime.runner_lifecycle.present

    def check_awake(self) -> None:
        """Raise RuntimeError if the model is asleep."""
        if self._runtime.asleep:
            raise RuntimeError("the engine is asleep, and has no pages; call its wake() first")

    def checked_runner(self) -> ModelRunner:
        """Check the model, and return its model runner; RuntimeError if it can serve no request.

        Raises:
            DeviceLostError: the device runs nothing more in this process.
        """
        self._check_device()
        if (model_runner := self._seen_before()) is None:
            placement = self._check_no_obstacle()
            model_runner = self._runtime.model_runner(placement)
            self._seen = weakref.ref(model_runner)
            self.tokens = TokenFacts.of(self._model)
        return model_runner

    def _seen_before(self) -> ModelRunner | None:
        """Return the model runner if an earlier check is enough."""
        if self._watching or self._seen is None or self._runtime.asleep:
            return None
        seen = self._seen()
        return seen if seen is self.present else None

    def _check_no_obstacle(self) -> Placement:
        """Return the model's placement: to find it, all modules are walked."""
        self._check_device()
        placement = self._runtime.placement()
        if (reason := self.obstacle(placement)) is not None:
            raise RuntimeError(reason)
        return placement

    def refuse_all(self, error: DeviceLostError) -> None:
        """Refuse all requests from now on."""
        if self.lost is None:
            logger.error("compiled_llm: %s", error)
        self.lost = self.lost or error

    def _check_device(self) -> None:
        if self.lost is not None:
            raise DeviceLostError(str(self.lost)) from self.lost

    def check_for_request(self) -> ModelRunner:
        """As ``checked_runner``, before a request is submitted; a loop that begins soon relies on it."""
        model_runner = self.checked_runner()
        self._submitted = time.monotonic(), weakref.ref(model_runner)
        return model_runner

    # ---- in the thread that runs the loop

    def begin(self) -> ModelRunner:
        """Return the model runner that the loop begins with."""
        self._check_device()
        submitted, self._submitted, self._begun = self._submitted, None, None
        if submitted is not None and time.monotonic() - submitted[0] < _SECONDS:
            self._begun = submitted[1]
        return (self._begun and self._begun()) or self._seen_before() or self._runtime.model_runner()

    @property
    def due(self) -> float:
        """When the loop checks again, unless the prefix cache is cleared before, on ``time.monotonic``'s clock."""
        return self._checked + _SECONDS if self._watching else math.inf

    def check_if_due(self, model_runner: ModelRunner) -> bool:
        """Check if the loop has not for a while, or a cleared prefix cache says that the model may have changed."""
        # True if it has checked. RuntimeError if requests that run on ``model_runner`` cannot go on.
        now, at = time.monotonic(), (weakref.ref(model_runner), model_runner.prefixes.generation)
        if at == self._checked_at and (now - self._checked < _SECONDS or not self._watching):
            return False
        begun, self._begun = self._begun, None
        if begun is None or begun() is not model_runner:
            placement = self._check_no_obstacle()
            if not self._runtime.is_current(model_runner, placement):  # a new one is made once nothing runs on the old
                raise RuntimeError("the model was moved or converted while requests were running; submit them again")
        self._checked, self._checked_at = now, at
        return True

    def forget(self) -> None:
        """Check again before the next step: the model may change from now on."""
        self._checked, self._submitted, self._begun = 0.0, None, None
