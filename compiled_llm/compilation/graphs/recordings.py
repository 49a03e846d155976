"""The recordings of one model, decode steps by bucket and prefills by shape, and whether they are still valid.

Everything here runs in the model's executor.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compat import cudagraph_messages, cudagraph_recordings, cudagraph_skips
from compiled_llm.compilation.graphs.outputs import SharedOutputs, StepOutputs
from compiled_llm.compilation.graphs.recorder import Captured, Recorder
from compiled_llm.compilation.graphs.rolling import Entry, Key, RollingRecordings
from compiled_llm.compilation.graphs.validity import Guards, Weights
from compiled_llm.compilation.inputs import DecodeInputs, PrefillInputs, Shape
from compiled_llm.config import WrapConfig
from compiled_llm.kvcache.memory import reserved_bytes

logger = logging.getLogger("compiled_llm.graphs")

StepInputs = PrefillInputs | DecodeInputs

_OWNER = "steps"


class Filled(NamedTuple):
    """What a recorded step begins with.

    Attributes:
        tensor: to be filled before it is replayed.
        nbytes: size of this and all else that was allocated for the step alone.
    """

    tensor: Tensor
    nbytes: int


class _Known(NamedTuple):
    """What is known of a recorded step.

    Attributes:
        guards: what the compiled program inside takes for granted.
        filled: what it begins with, if that is filled before it is replayed.
    """

    guards: Guards
    filled: Filled | None


class Recordings:
    """The CUDA graphs of a model's steps: ours, or those of cudagraph trees, which are only counted here.

    Attributes:
        ours: whether steps are captured here.
        replay: whether decode steps are replayed, by us or by cudagraph trees.
        rolling: has them, and those of choices.
        skips: how often Inductor did not capture what it was asked to.
        reasons: what it said then.
        prefills: how many prefills have been captured.
        nbytes: device memory that compiling and recording took for good.
    """

    def __init__(
        self, model: PreTrainedModel, config: WrapConfig, device: torch.device, rolling: RollingRecordings
    ) -> None:
        """Capture nothing yet; only a weak reference to the model is kept.

        Args:
            model: whose steps they are.
            config: the options of ``wrap``.
            device: where the model is.
            rolling: has all recordings of the model, others too.
        """
        self.rolling = rolling
        self.ours = config.records_on(device.type)
        self.replay = self.ours or config.uses_trees_on(device.type)
        self.skips = 0
        self.reasons: list[str] = []
        self.prefills = 0
        self.nbytes = 0
        self._model = weakref.ref(model)
        self._device = device
        self._recorder = Recorder(device, in_pieces=config.leaves_attention_out) if self.ours else None
        # A model whose recordings are bounded copies what they give, in launches of their own.
        self._outputs = SharedOutputs(max(2, config.max_batch_size)) if any(rolling.budget) else None
        self._known: dict[Key, _Known] = {}
        rolling.when_dropped.append(functools.partial(_forget, self._known))
        self._weights: Weights | None = None
        self._before = cudagraph_recordings(device)
        self._expected = 0
        self._lost: set[Key] = set()
        self._moved: list[str] = []
        self._addresses: dict[str, dict[str, int]] = {}

    # ---- ours

    def __contains__(self, key: Key) -> bool:
        """Whether there is a recording of a step, valid or not."""
        return key in self.rolling

    def __len__(self) -> int:
        """How many recordings there are."""
        return len(self.rolling.of("decode", "prefill"))

    def shapes(self) -> list[Shape]:
        """Return what prefills are recorded."""
        return [key for key in self.rolling.of("prefill") if isinstance(key, Shape)]

    def get(self, key: Key) -> Entry[Captured[StepOutputs]] | None:
        """Return the recording of a step, if there is one."""
        return self.rolling.get(key)

    def record(
        self,
        key: Key,
        launch: Callable[[], StepOutputs],
        like: StepOutputs,
        guards: Callable[[], Guards],
        filled: Filled | None = None,
    ) -> None:
        """Capture a step that has run before; the least recently used ones make room for it.

        Args:
            key: its name from now on.
            launch: runs it.
            like: what it gave when it ran.
            guards: returns what the compiled program in it takes for granted.
            filled: what it begins with, if that is filled before each replay.

        Raises:
            RuntimeError: something in it cannot be captured.
            ValueError: it does not fit beside what the same step replays.
        """
        assert self._recorder is not None
        if self._weights is None:
            self._weights = Weights(self._require_model())
        self.rolling.make_room(key)
        shared = self._shared_bytes()
        if self._outputs is not None:
            launch = self._outputs.writing(launch, like)
        captured = self._recorder.capture(launch)
        self._known[key] = _Known(guards(), filled)
        own, cost = 0 if filled is None else filled.nbytes, captured.cost
        cost = cost._replace(nbytes=cost.nbytes + own, shared=cost.shared + self._shared_bytes() - shared)
        self.prefills += isinstance(key, Shape)
        self.rolling.add(key, captured, cost, _OWNER)

    def _shared_bytes(self) -> int:
        return 0 if self._outputs is None else self._outputs.nbytes

    def weights_valid(self) -> bool:
        """Whether there are recordings, and the model's modules and tensors are those that they read."""
        return self._weights is not None and self._weights.valid()

    def guards_valid(self, key: Key, glance: int) -> bool:
        """Whether nothing else about the model has changed since a step was captured; ``glance`` as in ``Guards``."""
        return self._known[key].guards.valid(glance)

    def filled(self, key: Key) -> Tensor:
        """Return the tensor that a recorded step begins with, to be filled before it is replayed."""
        filled = self._known[key].filled
        assert filled is not None
        return filled.tensor

    def forget(self) -> set[Key]:
        """Drop all recordings; returns which there were."""
        self._moved = self.moved_weights()
        dropped = set(self.rolling.of("decode", "prefill"))
        self._lost |= dropped
        self.rolling.drop(dropped)
        self.rolling.shared[_OWNER] = 0
        self._weights = None
        if self._outputs is not None:
            self._outputs.release()
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


def _forget(known: dict[Key, _Known], key: Key) -> None:
    known.pop(key, None)
