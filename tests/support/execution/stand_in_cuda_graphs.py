"""CudaGraphs on a CPU, with a stand-in for CUDA graphs, which only a GPU has: a replay launches once more.

A CUDA graph reads weights where they were; the stand-in raises an error where they no longer are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import WrapConfig
from compiled_llm.compilation.graphs.capture import CapturedGraph
from compiled_llm.compilation.graphs.cuda_graphs import CudaGraphs, StepToCapture
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.step_table import Cost, StepTable
from compiled_llm.compilation.graphs.validity import Guards
from compiled_llm.model.version.model_version import ModelVersion
from support.tiny_models import tiny_qwen3

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "3000 tokens", "max_batch_size": 8, "progress": False}


class StandIn(CapturedGraph[Any]):
    def __init__(self, model: PreTrainedModel, launch: Callable[[], Any]) -> None:
        self.cost = Cost(nbytes=1000, shared=10, seconds=0.5)
        self._version, self._run, self.outputs = ModelVersion(model, 0), launch, None
        self._tensors = self._version.tensors
        self.released = False

    def launch(self) -> None:
        assert not self.released
        self._version.begin_check()
        assert self._tensors == self._version.tensors, "a replay would read weights where they no longer are"
        new = self._run()
        self.outputs = new if self.outputs is None else self.outputs
        for output, value in zip(_tensors(self.outputs), _tensors(new), strict=True):
            output.copy_(value)

    def release(self) -> None:
        self.released = True


def _tensors(outputs: Any) -> list[Tensor]:
    return [tensor for tensor in tree_leaves(outputs) if isinstance(tensor, Tensor)]


class Capture(NamedTuple):
    """One that was begun."""

    future: Future[StandIn]
    captured: Callable[[], StandIn]

    def finish(self) -> None:
        try:
            self.future.set_result(self.captured())
        except Exception as error:
            self.future.set_exception(error)

    def fail(self) -> None:
        self.future.set_exception(RuntimeError("no capture"))


class StandInGraphCapture:
    """Captures that are made beside the steps take ``slices``, or until the test finishes what is ``late``."""

    slices: ClassVar[float] = 1
    late: ClassVar[list[Capture]] = []

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self._left: float = 0

    def take_new_pool(self) -> None:
        pass

    def capture(self, launch: Callable[[], Any]) -> StandIn:
        model = self._model()
        assert model is not None
        return StandIn(model, launch)

    def begin(self, launch: Callable[[], Any], check: Callable[[], None]) -> Future[StandIn]:
        def captured() -> StandIn:
            with torch.no_grad():
                check()
            return self.capture(launch)

        assert not self.late, "one at a time"
        begun = Capture(Future(), captured)
        self.late.append(begun)
        self._left = self.slices
        return begun.future

    def run_slices(self, ended: Callable[[], bool]) -> None:
        self._left -= 1
        while 0 < self._left < float("inf") and not ended():
            self._left -= 1
        if self._left <= 0:
            self.finish()

    def finish(self) -> None:
        while self.late:
            self.late.pop().finish()


class NoGuards(Guards):
    """Of a program that is not compiled."""

    def __init__(self) -> None:
        pass

    def find(self) -> None:
        pass

    def valid(self) -> bool:
        return True


def let_a_cpu_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU capture as CUDA does."""
    own, own_noted = CudaGraphs.__init__, CudaGraphs._note_captured

    def init(
        self: CudaGraphs, model: PreTrainedModel, config: WrapConfig, device: torch.device, table: StepTable
    ) -> None:
        own(self, model, config, device, table)
        self.ours = self.replay = True
        table.runnable_state = "ready"
        self._capturer = StandInGraphCapture(model)
        self._compiled = config.mode != "eager"

    def noted(self: CudaGraphs, key: StepKey, step: StepToCapture) -> None:
        own_noted(self, key, step if self._compiled else step._replace(guards=NoGuards()))

    monkeypatch.setattr(CudaGraphs, "__init__", init)
    monkeypatch.setattr(CudaGraphs, "_note_captured", noted)


def one_layer() -> PreTrainedModel:
    return tiny_qwen3(num_hidden_layers=1, eos_token_id=None)


def uncompiled(
    monkeypatch: pytest.MonkeyPatch, max_graphs: int | None = None, nbytes: int | None = None, **options: Any
) -> Any:
    """A model that is not compiled; options for graphs are refused with it, so a budget is put under it."""
    monkeypatch.setattr(WrapConfig, "graph_budget", property(lambda self: (nbytes, max_graphs)))
    return compiled_llm.wrap(one_layer(), **{**OPTIONS, "mode": "eager", **options})


def let_captures_be_late(monkeypatch: pytest.MonkeyPatch, slices: float) -> None:
    """Let a CPU capture as CUDA does, in so many slices."""
    let_a_cpu_capture(monkeypatch)
    monkeypatch.setattr(StandInGraphCapture, "late", [])
    monkeypatch.setattr(StandInGraphCapture, "slices", slices)


def finish_all() -> None:
    while StandInGraphCapture.late:
        StandInGraphCapture.late.pop().finish()
