"""Recordings on a CPU, with a stand-in for CUDA graphs, which only a GPU has: a replay launches once more.

A CUDA graph reads weights where they were; the stand-in raises an error where they no longer are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm import WrapConfig
from compiled_llm.compilation.graphs.recorder import Captured
from compiled_llm.compilation.graphs.recordings import Recordings
from compiled_llm.compilation.graphs.rolling import Cost, RollingRecordings
from compiled_llm.compilation.graphs.validity import Guards, Weights


class StandIn(Captured[Any]):
    def __init__(self, weights: Weights, launch: Callable[[], Any]) -> None:
        self.cost = Cost(nbytes=1000, shared=10, seconds=0.5)
        self._weights, self._launch, self._outputs = weights, launch, None
        self.released = False

    def replay(self) -> Any:
        assert not self.released
        assert self._weights.valid(), "a replay would read weights where they no longer are"
        new = self._launch()
        self._outputs = self._outputs or new
        for output, value in zip(self._outputs, new, strict=True):
            output.copy_(value)
        return self._outputs

    def release(self) -> None:
        self.released = True


class StandInRecorder:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self.count = 0

    def take_new_pool(self) -> None:
        pass

    def capture(self, launch: Callable[[], Any]) -> StandIn:
        self.count += 1
        return StandIn(Weights(self._model()), launch)


class _NoGuards(Guards):
    """Of a program that is not compiled."""

    def __init__(self) -> None:
        pass

    def valid(self, glance: int | None = None) -> bool:
        return True


def let_a_cpu_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU record as CUDA does."""
    own, own_record = Recordings.__init__, Recordings.record

    def init(
        self: Recordings, model: PreTrainedModel, config: WrapConfig, device: torch.device, rolling: RollingRecordings
    ) -> None:
        own(self, model, config, device, rolling)
        self.ours = self.replay = True
        self._recorder = StandInRecorder(model)
        self._compiled = config.mode != "eager"

    def record(self: Recordings, key: Any, launch: Any, like: Any, guards: Any, filled: Any = None) -> None:
        own_record(self, key, launch, like, guards if self._compiled else _NoGuards, filled)

    monkeypatch.setattr(Recordings, "__init__", init)
    monkeypatch.setattr(Recordings, "record", record)
