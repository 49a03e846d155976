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
from compiled_llm.compilation.graphs.recorder import Recording
from compiled_llm.compilation.graphs.recordings import Recordings
from compiled_llm.compilation.graphs.validity import Guards, Weights


class StandIn(Recording[Any, Any]):
    def __init__(self, weights: Weights, launch: Callable[[], Any], inputs: Any, guards: Guards) -> None:
        self.inputs, self.guards = inputs, guards
        self._weights, self._launch, self._outputs = weights, launch, None

    def replay(self) -> Any:
        assert self._weights.valid(), "a replay would read weights where they no longer are"
        new = self._launch()
        self._outputs = self._outputs or new
        for output, value in zip(self._outputs, new, strict=True):
            output.copy_(value)
        return self._outputs


class StandInRecorder:
    def __init__(self, model: PreTrainedModel, compiled: bool = True) -> None:
        self._model, self._compiled = weakref.ref(model), compiled
        self.count = 0

    def take_new_pool(self) -> None:
        pass

    def record(self, launch: Callable[[], Any], inputs: Any, guards: Callable[[], Guards]) -> StandIn:
        self.count += 1
        return StandIn(Weights(self._model()), launch, inputs, guards() if self._compiled else _NoGuards())


class _NoGuards(Guards):
    """Of a program that is not compiled."""

    def __init__(self) -> None:
        pass

    def valid(self, glance: int | None = None) -> bool:
        return True


def let_a_cpu_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU record as CUDA does."""
    own = Recordings.__init__

    def init(self: Recordings, model: PreTrainedModel, config: WrapConfig, device: torch.device) -> None:
        own(self, model, config, device)
        self.ours = self.replay = True
        self._recorder = StandInRecorder(model, compiled=config.mode != "eager")

    monkeypatch.setattr(Recordings, "__init__", init)
