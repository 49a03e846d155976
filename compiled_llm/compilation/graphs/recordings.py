"""The recordings of one model, decode steps by bucket and prefills by shape, and whether they are still valid.

Everything here runs in the model's executor.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compat import cudagraph_messages, cudagraph_recordings, cudagraph_skips
from compiled_llm.compilation.graphs.recorder import Recorder, Recording
from compiled_llm.compilation.graphs.validity import Guards, Weights
from compiled_llm.compilation.inputs import DecodeInputs, PrefillInputs, Shape
from compiled_llm.config import WrapConfig
from compiled_llm.kvcache.memory import reserved_bytes

logger = logging.getLogger("compiled_llm.graphs")

StepOutputs = tuple[Tensor, Tensor]
"""Logits, and the tokens chosen from them."""

StepInputs = PrefillInputs | DecodeInputs

Key = int | Shape
"""A decode bucket, or what a prefill is padded to."""


class Recordings:
    """The CUDA graphs of a model's steps: ours, or those of cudagraph trees, which are only counted here.

    Attributes:
        ours: whether steps are captured here.
        replay: whether decode steps are replayed, by us or by cudagraph trees.
        skips: how often Inductor did not capture what it was asked to.
        reasons: what it said then.
        prefills: how many prefills have been captured.
        nbytes: device memory that compiling and recording took for good.
    """

    def __init__(self, model: PreTrainedModel, config: WrapConfig, device: torch.device) -> None:
        """Capture nothing yet; only a weak reference to the model is kept."""
        self.ours = config.records_on(device.type)
        self.replay = self.ours or config.uses_trees_on(device.type)
        self.skips = 0
        self.reasons: list[str] = []
        self.prefills = 0
        self.nbytes = 0
        self._model = weakref.ref(model)
        self._device = device
        self._recorder = Recorder(device) if self.ours else None
        self._steps: dict[Key, Recording[StepInputs, StepOutputs]] = {}
        self._weights: Weights | None = None
        self._before = cudagraph_recordings(device)
        self._expected = 0
        self._lost: set[Key] = set()
        self._moved: list[str] = []
        self._addresses: dict[str, dict[str, int]] = {}

    # ---- ours

    def __contains__(self, key: Key) -> bool:
        """Whether there is a recording of a step, valid or not."""
        return key in self._steps

    def __len__(self) -> int:
        """How many recordings there are."""
        return len(self._steps)

    def shapes(self) -> list[Shape]:
        """Return what prefills are recorded."""
        return [key for key in self._steps if isinstance(key, Shape)]

    def get(self, key: Key) -> Recording[StepInputs, StepOutputs] | None:
        """Return the recording of a step, if there is one."""
        return self._steps.get(key)

    def record(
        self, key: Key, launch: Callable[[], StepOutputs], inputs: StepInputs, guards: Callable[[], Guards]
    ) -> None:
        """Capture a step that has run before.

        Args:
            key: its name from now on.
            launch: runs it.
            inputs: the tensors it reads.
            guards: returns what the compiled program in it takes for granted.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        assert self._recorder is not None
        if self._weights is None:
            self._weights = Weights(self._require_model())
        self._steps[key] = self._recorder.record(launch, inputs, guards)
        self.prefills += isinstance(key, Shape)

    def weights_valid(self) -> bool:
        """Whether there are recordings, and the model's modules and tensors are those that they read."""
        return self._weights is not None and self._weights.valid()

    def guards_valid(self, key: Key, glance: int) -> bool:
        """Whether nothing else about the model has changed since a step was captured; ``glance`` as in ``Guards``."""
        return self._steps[key].guards.valid(glance)

    def forget(self) -> set[Key]:
        """Drop all recordings; returns which there were."""
        self._moved = self.moved_weights()
        dropped = set(self._steps)
        self._lost |= dropped
        self._steps.clear()
        self._weights = None
        if self._recorder is not None:
            self._recorder.take_new_pool()
        return dropped

    def lost(self, key: Key) -> bool:
        """Whether a step has been captured and dropped before."""
        return key in self._lost

    # ---- accounts

    @contextmanager
    def accounted(self, what: str) -> Iterator[None]:
        """Count what the block takes from the allocator for good, and what it should have captured and did not."""
        nbytes, skips, decodes = reserved_bytes(self._device), cudagraph_skips(), self.decodes()
        with cudagraph_messages() as messages:
            yield
        self.reasons += messages
        self.nbytes += max(0, reserved_bytes(self._device) - nbytes)
        self.skips += cudagraph_skips() - skips
        self._expected += self.decodes() - decodes
        if self.replay:
            self._addresses[what] = self._addresses_now()
        logger.debug("%s prepared, %d decode steps and %d prefills recorded", what, self.decodes(), self.prefills)

    def decodes(self) -> int:
        """Return how many decode steps have been captured."""
        if self._recorder is not None:
            return self._recorder.count - self.prefills
        return max(0, cudagraph_recordings(self._device) - self._before)

    def repeated(self) -> int:
        """Return how many steps were captured again, between steps that only replay, or have to be."""
        return len(self._lost) + max(0, self.decodes() - self._expected)

    def moved_weights(self) -> list[str]:
        """Return the parameters and buffers that are no longer where a captured graph reads them."""
        recorded = self._addresses.values()
        return self._moved + [
            name
            for name, address in self._addresses_now().items()
            if name not in self._moved and any(then.get(name, address) != address for then in recorded)
        ]

    def _addresses_now(self) -> dict[str, int]:
        model = self._require_model()
        return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def _require_model(self) -> PreTrainedModel:
        model = self._model()
        assert model is not None, "only a model that exists takes steps"
        return model
