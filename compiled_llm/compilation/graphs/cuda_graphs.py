"""The CUDA graphs of one model, decode steps by padded batch size and prefills by shape, and whether they are valid.

All of this runs in the model's executor, but for a capture between steps: that calls ``StepToCapture.launch`` in the
capturer's thread, in slices, and touches no state of this module. One is underway at a time. Code that drops CUDA
graphs finishes it first.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compat.torch.cudagraph_trees import cudagraph_messages, cudagraph_skips, cudagraph_tree_graphs
from compiled_llm.compilation.graphs.capture import CapturedGraph, GraphCapture, abandon
from compiled_llm.compilation.graphs.outputs import SharedOutputs, StepOutputs
from compiled_llm.compilation.graphs.rolling import Cost, GraphEntry, RollingCudaGraphs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.graphs.validity import Guards
from compiled_llm.compilation.inputs import DecodeInputs, PrefillInputs
from compiled_llm.config import WrapConfig
from compiled_llm.kvcache.memory import reserved_bytes

logger = logging.getLogger("compiled_llm.graphs")

StepInputs = PrefillInputs | DecodeInputs

_OWNER = "steps"
Begin = Callable[[], "Begin | None"]


class Filled(NamedTuple):
    """The input of a captured step.

    Attributes:
        tensor: to be filled before each replay.
        nbytes: size of this and all else that was allocated for the step alone.
    """

    tensor: Tensor
    nbytes: int


class StepToCapture(NamedTuple):
    """A step to capture.

    Attributes:
        check: finds ``guards``, and raises if ``launch`` would compile; any thread may call both.
        launch: runs it.
        like: its outputs, or their number of rows, if it ran before the last eviction.
        guards: of the compiled program in it.
        filled: its input, if that is filled before each replay.
    """

    check: Callable[[], None]
    launch: Callable[[], StepOutputs]
    like: StepOutputs | int
    guards: Guards
    filled: Filled | None = None


class _Known(NamedTuple):
    """The guards of a captured step, and its input, if that is filled before each replay."""

    guards: Guards
    filled: Filled | None


class _Underway(NamedTuple):
    """A capture underway; the shared outputs have grown for it by ``shared`` bytes."""

    key: StepKey
    captured: Future[CapturedGraph[StepOutputs]]
    known: _Known
    shared: int


class CudaGraphs:
    """The CUDA graphs of a model's steps: ours, or those of cudagraph trees, which are only counted here.

    Attributes:
        ours: whether steps are captured here.
        replay: whether decode steps are replayed, by us or by cudagraph trees.
        rolling: holds these graphs, and those of sampling.
        skips: how often Inductor did not capture a graph that it should have.
        reasons: its messages about that.
        nbytes: device memory that compiling and capturing took for good.
    """

    def __init__(
        self, model: PreTrainedModel, config: WrapConfig, device: torch.device, rolling: RollingCudaGraphs
    ) -> None:
        """Only a weak reference to the model is kept. ``rolling`` holds all CUDA graphs of the model, others too."""
        self.rolling = rolling
        self.ours = config.captures_on(device.type)
        self._in_trees = config.uses_trees_on(device.type)
        self.replay = self.ours or self._in_trees
        self.skips = 0
        self.reasons: list[str] = []
        self.prefills = 0
        self.nbytes = 0
        self._model = weakref.ref(model)
        self._device = device
        self._capturer = GraphCapture(device, in_pieces=config.leaves_attention_out) if self.ours else None
        # A model whose CUDA graphs are bounded copies what they give, in launches of their own.
        self._outputs = SharedOutputs(max(2, config.max_batch_size)) if any(rolling.budget) else None
        self._underway: _Underway | None = None
        self._wanted: tuple[StepKey, Begin] | None = None  # to be captured next, and what begins that
        self._half_begun: tuple[StepKey, Begin] | None = None  # and what goes on with it
        self._failed: set[StepKey] = set()
        self._decodes = 0
        self._known: dict[StepKey, _Known] = {}
        rolling.when_dropped.append(functools.partial(_forget, self._known))
        self._before = cudagraph_tree_graphs(device) if self._in_trees else 0
        self._expected = 0
        self._lost: set[StepKey] = set()
        self._moved: list[str] = []
        self._addresses: dict[str, dict[str, int]] = {}

    # ---- ours

    def __contains__(self, key: StepKey) -> bool:
        """Whether there is a CUDA graph of a step, valid or not."""
        return key in self.rolling

    def __len__(self) -> int:
        return len(self.rolling.of("decode", "prefill"))

    def get(self, key: StepKey) -> GraphEntry[CapturedGraph[StepOutputs]] | None:
        return self.rolling.get(key)

    def capture(self, key: StepKey, step: StepToCapture) -> None:
        """Capture a step that has run before, while no other capture runs; the least recently used graphs make room.

        Raises:
            RuntimeError: an operation in it cannot be captured.
            ValueError: it does not fit together with the graphs that the same step replays.
        """
        self._failed.discard(key)
        self.rolling.make_room(key)
        launch, known, shared = self._prepared(step)
        step.check()
        assert self._capturer is not None
        captured = self._capturer.capture(launch)
        self._known[key] = known
        self._count(key)
        self.rolling.add(key, captured, self._cost(captured, known, shared), _OWNER)

    # ---- while steps go on

    def want(self, key: StepKey, begin: Begin) -> None:
        """Capture a step after this one was launched, if no other capture runs, and this one is possible.

        ``begin`` calls ``self.begin`` with it, or returns a function that does so after the next step.
        """
        if self._capturer is not None and key not in self._failed and self.rolling.has_room_for(key):
            self._wanted = key, begin
            self.rolling.changed()  # steps that repeat themselves would leave it no time

    def needs_room_now(self, key: StepKey) -> bool:
        """Whether a missing step can be captured only in place of others: between steps, few of these may go."""
        return key not in self and key not in self._failed and self.rolling.full

    def begin(self, key: StepKey, step: StepToCapture) -> None:
        """Begin to capture a step; ``go_on`` continues, and ``adopt`` adds the result."""
        launch, known, shared = self._prepared(step)
        assert self._capturer is not None
        self._underway = _Underway(key, self._capturer.begin(launch, step.check), known, shared)

    @property
    def background_captures(self) -> bool:
        """Whether there is a graph to capture between steps, or to release."""
        underway = any(each is not None for each in (self._underway, self._half_begun, self._wanted))
        return underway or self.rolling.releases_later

    def go_on(self) -> None:
        """Capture missing graphs for a slice, once the evicted graphs that made room have ended."""
        if self._underway is not None:
            assert self._capturer is not None
            self._capturer.run_slice()
        elif not self.rolling.release_ended():
            return
        elif self._half_begun is not None:
            self._begin_with(*self._half_begun)
        elif self._wanted is not None:
            wanted, self._wanted = self._wanted, None
            self._begin_with(*wanted)

    def _begin_with(self, key: StepKey, begin: Begin) -> None:
        self._half_begun = None
        if key in self:
            return
        try:
            then = begin()
        except Exception as error:
            self._note_failure(key, error)
        else:
            self._half_begun = None if then is None else (key, then)

    def adopt(self) -> StepKey | None:
        """Add the graph underway if it is captured, and return its key; the least recently used ones make room for it.

        A failure is logged the first time, and counted; it is not tried again by itself.
        """
        underway = self._underway
        if underway is None or not underway.captured.done():
            return None
        self._underway, key = None, underway.key
        self.rolling.changed()  # also if it has failed: steps need leave no time any more
        try:
            captured = underway.captured.result()
        except Exception as error:
            self._note_failure(key, error)
            return None
        self.nbytes += captured.cost.shared
        known, cost = underway.known, self._cost(captured, underway.known, underway.shared)
        self._known[key] = known
        self._count(key)
        return key if self.rolling.try_to_add(key, captured, cost, _OWNER) else None

    def settle(self) -> None:
        """End captures before a wait for the whole device, which is an error during a capture. Any thread may."""
        self._wanted = self._half_begun = None
        self.finish()

    def finish(self) -> None:
        if self._underway is not None:
            assert self._capturer is not None
            self._capturer.finish()

    def _count(self, key: StepKey) -> None:
        self.prefills += key.phase == "prefill"
        self._decodes += key.phase == "decode"

    @staticmethod
    def _cost(captured: CapturedGraph[StepOutputs], known: _Known, shared: int) -> Cost:
        own, cost = 0 if known.filled is None else known.filled.nbytes, captured.cost
        return cost._replace(nbytes=cost.nbytes + own, shared=cost.shared + shared)

    def _prepared(self, step: StepToCapture) -> tuple[Callable[[], StepOutputs], _Known, int]:
        """Return the launch to capture, its guards and input, and the growth of the shared outputs in bytes."""
        if "captured" not in self._addresses:
            self._addresses["captured"] = self._addresses_now()
        before, launch = self._shared_bytes(), step.launch
        if self._outputs is not None:
            launch = self._outputs.writing(launch, step.like)
        return launch, _Known(step.guards, step.filled), self._shared_bytes() - before

    def _note_failure(self, key: StepKey, error: Exception) -> None:
        level = logging.DEBUG if self._failed else logging.WARNING
        logger.log(
            level,
            "compiled_llm: a step could not be captured as a CUDA graph, and runs kernel by kernel or in a larger one: "
            "%s: %s; warmup() tries again, and the next ones are only counted (model.compiled.cuda_graphs)",
            type(error).__name__,
            error,
        )
        self._failed.add(key)
        self.rolling.failed(key)

    @property
    def can_begin(self) -> bool:
        """Whether a step can be captured that has never run: the place of its outputs is known."""
        return self._outputs is None or self._outputs.nbytes > 0

    def _shared_bytes(self) -> int:
        return 0 if self._outputs is None else self._outputs.nbytes

    def guards_valid(self, key: StepKey) -> bool:
        """Whether the program of a captured step is still the one that would run, whatever tensors there are."""
        return self._known[key].guards.valid()

    def filled(self, key: StepKey) -> Tensor:
        filled = self._known[key].filled
        assert filled is not None
        return filled.tensor

    def forget(self) -> set[StepKey]:
        """Drop all graphs; return their keys."""
        if self._underway is not None:
            abandon(self._underway.captured)
            self.settle()
            self._underway = None
        self._wanted = self._half_begun = None
        self._failed.clear()
        self._moved = self.moved_weights()
        dropped = set(self.rolling.of("decode", "prefill"))
        self._lost |= dropped
        self.rolling.drop(dropped)
        self.rolling.shared[_OWNER] = 0
        self._addresses.pop("captured", None)
        if self._outputs is not None:
            self._outputs.release()
        if self._capturer is not None:
            self._capturer.take_new_pool()
        return dropped

    def lost(self, key: StepKey) -> bool:
        """Whether a step has been captured and dropped before."""
        return key in self._lost

    # ---- accounts

    @contextmanager
    def accounted(self, what: str) -> Iterator[None]:
        """Count the block's permanent allocations, and the graphs that it failed to capture."""
        nbytes, skips, decodes = reserved_bytes(self._device), cudagraph_skips(), self.decodes()
        with cudagraph_messages() as messages:
            yield
        self.reasons += messages
        self.nbytes += max(0, reserved_bytes(self._device) - nbytes)
        self.skips += cudagraph_skips() - skips
        self._expected += self.decodes() - decodes
        if self.replay:
            self._addresses[what] = self._addresses_now()
        logger.debug("%s prepared, %d decode steps and %d prefills captured", what, self.decodes(), self.prefills)

    def decodes(self) -> int:
        if self._in_trees:
            return max(0, cudagraph_tree_graphs(self._device) - self._before)
        return self._decodes

    def repeated(self) -> int:
        """Return how many steps were captured again, or have to be."""
        return len(self._lost) + (0 if self.ours else max(0, self.decodes() - self._expected))

    def moved_weights(self) -> list[str]:
        """Return the parameters and buffers that have left the addresses that a graph reads."""
        captured = self._addresses.values()
        return self._moved + [
            name
            for name, address in self._addresses_now().items()
            if name not in self._moved and any(then.get(name, address) != address for then in captured)
        ]

    def _addresses_now(self) -> dict[str, int]:
        model = self._require_model()
        return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def _require_model(self) -> PreTrainedModel:
        model = self._model()
        assert model is not None, "only a model that exists takes steps"
        return model


def _forget(known: dict[StepKey, _Known], key: StepKey) -> None:
    known.pop(key, None)
