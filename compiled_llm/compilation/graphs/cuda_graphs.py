"""One model's CUDA graphs, decode steps by padded batch size and prefills by shape, and whether they are valid."""

# All of this runs in the model's executor, but for a capture between steps: that calls ``StepToCapture.launch`` in the
# capturer's thread, in slices, and touches no state of this module. One is underway at a time. Code that drops CUDA
# graphs finishes it first.

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compat.torch.capturing import CaptureBrokenError
from compiled_llm.compat.torch.cudagraph_trees import cudagraph_messages, cudagraph_skips, cudagraph_tree_graphs
from compiled_llm.compat.torch.dynamo import NotCompiledError
from compiled_llm.compat.torch.gate import GATE
from compiled_llm.compilation.graphs.capture import TIMES_BROKEN, CapturedGraph, GraphCapture, abandon
from compiled_llm.compilation.graphs.outputs import SharedOutputs, StepOutputs
from compiled_llm.compilation.graphs.step_key import STEPS, StepKey
from compiled_llm.compilation.graphs.step_table import ATTEMPTS, Cost, StepTable
from compiled_llm.compilation.graphs.validity import Checks
from compiled_llm.compilation.graphs.wanted_steps import Begin as Begin, WantedSteps
from compiled_llm.compilation.inputs import DecodeInputs, PrefillInputs
from compiled_llm.config import WrapConfig
from compiled_llm.kvcache.memory import reserved_bytes

logger = logging.getLogger("compiled_llm.graphs")

StepInputs = PrefillInputs | DecodeInputs

_OWNER = "steps"


class Filled(NamedTuple):
    """The input of a captured step."""

    tensor: Tensor  # to be filled before each replay
    nbytes: int  # size of this and all else that was allocated for the step alone


class StepToCapture(NamedTuple):
    """A step to capture."""

    check: Callable[[], None]  # finds ``guards``, and raises if ``launch`` would compile; any thread may call both
    launch: Callable[[], StepOutputs]  # runs it
    like: StepOutputs  # its outputs, of its last run
    guards: Checks  # of the compiled program in it
    filled: Filled | None = None  # its input, if that is filled before each replay


class _Underway(NamedTuple):
    """A capture underway; the shared outputs have grown for it by ``shared`` bytes."""

    key: StepKey
    captured: Future[CapturedGraph[StepOutputs]]
    step: StepToCapture
    shared: int
    broken: int = 0  # how often another thread has broken it


class CudaGraphs:
    """The CUDA graphs of a model's steps: ours, or those of cudagraph trees, which are only counted here."""

    def __init__(self, model: PreTrainedModel, config: WrapConfig, device: torch.device, table: StepTable) -> None:
        """Only a weak reference to the model is kept. ``table`` has all steps of the model."""
        self.table = table  # holds these steps, and those of sampling
        self.ours = config.captures_on(device.type)  # whether steps are captured here
        self._in_trees = config.uses_trees_on(device.type)
        self.replay = self.ours or self._in_trees  # whether decode steps are replayed, by us or by cudagraph trees
        self.skips = 0  # how often Inductor did not capture a graph that it should have
        self.reasons: list[str] = []  # its messages about that
        self.nbytes = 0  # device memory that compiling and capturing took for good
        self._model = weakref.ref(model)
        self._device = device
        self._capturer = GraphCapture(device, in_pieces=config.leaves_attention_out) if self.ours else None
        # Where steps leave what they give. Logits of all tokens take too much memory for each graph to have its own; if
        # CUDA graphs are bounded, all of them copy what they give, in launches of their own.
        self._outputs = {"all logits": SharedOutputs(0)}
        if any(table.budget):
            rows = max(2, config.max_batch_size)
            self._outputs |= {name: SharedOutputs(rows) for name in ("logits", "pooled")}
        self._underway: _Underway | None = None
        self._wanted = WantedSteps()  # to be captured next
        self._half_begun: tuple[StepKey, Begin] | None = None  # and what goes on with it
        self._before = cudagraph_tree_graphs(device) if self._in_trees else 0
        self._expected = 0
        self._moved: list[str] = []
        self._addresses: dict[str, dict[str, int]] = {}

    # ---- ours

    def __len__(self) -> int:
        return len(self.table.of(*STEPS))

    def capture(self, key: StepKey, step: StepToCapture) -> None:
        """Capture a step that has run before, while no other capture runs; the least recently used graphs make room.

        Raises:
            RuntimeError: an operation in it cannot be captured.
            ValueError: it does not fit together with the graphs that the same step replays.
        """
        if self._half_begun is not None and self._half_begun[0] == key:
            self._give_up_half_begun()
        with self.table.capturing(key):
            self.table.make_room(key)
            launch, shared = self._prepared(key, step)
            step.check()
            assert self._capturer is not None
            captured = self._capturer.capture(launch)
            self.table.add(key, captured, self._cost(captured, step, shared), _OWNER)
        self._note_captured(key, step)

    # ---- while steps go on

    def want(self, key: StepKey, begin: Begin, padded: bool = False) -> None:
        """Capture a step, if possible, while later ones run; ``begin`` calls ``self.begin`` now or in the next."""
        # ``padded`` if it runs in a larger one until then.
        going = self.table.state(key) in ("capturing", "failed")
        if self._capturer is not None and not going and self.table.has_room_for(key):
            self._wanted.add(key, begin, padded)
            self.table.changed()  # steps that repeat themselves would leave it no time

    def begin(self, key: StepKey, step: StepToCapture, broken: int = 0) -> None:
        """Begin to capture a step; ``run_capture_slices`` continues, and ``adopt`` adds the result."""
        launch, shared = self._prepared(key, step)
        assert self._capturer is not None
        self._underway = _Underway(key, self._capturer.begin(launch, step.check), step, shared, broken)

    @property
    def background_captures(self) -> bool:
        """Whether there is a graph to capture between steps, or to release."""
        underway = self._underway is not None or self._half_begun is not None
        return underway or bool(self._wanted) or self.table.releases_later

    def run_capture_slices(self, ended: Callable[[], bool], settled: bool = True) -> None:
        """Capture missing graphs until their time has ``ended``, once evicted ones that made room have."""
        # ``settled`` if the steps to come are likely to be as the last one.
        # While some thread traces or needs the device for itself, none begins: steps do without for so long.
        goes_on = self._underway is not None
        if not goes_on and GATE.admits("capture", self._device) and self.table.release_ended():
            next_step, self._half_begun = self._half_begun or self._wanted.take(settled), None
            if next_step is not None:
                self._begin_with(*next_step)
        self._wanted.launched()
        if self._underway is not None and (goes_on or not ended()):
            assert self._capturer is not None
            self._capturer.run_slices(ended)

    def _begin_with(self, key: StepKey, begin: Begin) -> None:
        state = self.table.state(key)
        if state in ("ready", "failed"):  # by now
            return
        if state != "capturing":
            self.table.begin(key)
        try:
            then = begin()
        except Exception as error:
            self._note_failure(key, error)
            return
        if then is not None:
            self._half_begun = key, then
        elif self._underway is None:  # its program runs uncompiled
            self.table.give_up(key)

    def adopt(self) -> None:
        """Add the graph underway if it is captured; the least recently used ones make room for it."""
        # A failure is logged the first time, and counted; later steps try again, a few times.
        underway = self._underway
        if underway is None or not underway.captured.done():
            return
        self._underway, key = None, underway.key
        self.table.changed()  # also if it has failed: steps need leave no time any more
        try:
            captured = underway.captured.result()
        except Exception as error:
            if isinstance(error, CaptureBrokenError) and underway.broken < TIMES_BROKEN:
                logger.debug("the capture of a %s begins again: %s", key, error)
                self.begin(key, underway.step, underway.broken + 1)
            else:
                self._note_failure(key, error)
            return
        self.nbytes += captured.cost.shared
        if self.table.try_to_add(key, captured, self._cost(captured, underway.step, underway.shared), _OWNER):
            self._note_captured(key, underway.step)

    def end_captures(self) -> None:
        """End captures before a wait for the whole device, which is an error during a capture. Any thread may."""
        self._wanted.clear()
        self._give_up_half_begun()
        self.finish()

    def _give_up_half_begun(self) -> None:
        half_begun, self._half_begun = self._half_begun, None
        if half_begun is not None:
            self.table.give_up(half_begun[0])

    def finish(self) -> None:
        if self._underway is not None:
            assert self._capturer is not None
            self._capturer.finish()

    def _note_captured(self, key: StepKey, step: StepToCapture) -> None:
        entry = self.table.entries[key]
        entry.guards, entry.filled = step.guards, None if step.filled is None else step.filled.tensor

    @staticmethod
    def _cost(captured: CapturedGraph[StepOutputs], step: StepToCapture, shared: int) -> Cost:
        own, cost = 0 if step.filled is None else step.filled.nbytes, captured.cost
        return cost._replace(nbytes=cost.nbytes + own, shared=cost.shared + shared)

    def _prepared(self, key: StepKey, step: StepToCapture) -> tuple[Callable[[], StepOutputs], int]:
        """Return the launch to capture, and the growth of the shared outputs in bytes."""
        if "captured" not in self._addresses:
            self._addresses["captured"] = self._addresses_now()
        before, launch = self._shared_bytes(), step.launch
        outputs = self._outputs_of(key)
        if outputs is not None:
            launch = outputs.writing(launch, step.like)
        return launch, self._shared_bytes() - before

    def _note_failure(self, key: StepKey, error: Exception) -> None:
        if isinstance(error, (CaptureBrokenError, NotCompiledError)):  # which say nothing about the step
            logger.debug("the capture of a %s is given up: %s", key, error)
            self.table.give_up(key)
            return
        failed_before = any(entry.failures for entry in self.table.entries.values())
        logger.log(
            logging.DEBUG if failed_before else logging.WARNING,
            "compiled_llm: a step could not be captured as a CUDA graph, and runs kernel by kernel or in a larger one: "
            "%s: %s; later steps try again, up to %d times in all, and then only warmup() does; further failures are "
            "only counted (model.compiled.cuda_graphs)",
            type(error).__name__,
            error,
            ATTEMPTS,
        )
        self.table.fail(key)

    def _outputs_of(self, key: StepKey) -> SharedOutputs | None:
        """Return where a step leaves its outputs; None if its graph has its own."""
        name = "all logits" if key.phase == "scoring" else "pooled" if key.pooling else "logits"
        return self._outputs.get(name)

    def _shared_bytes(self) -> int:
        return sum(outputs.nbytes for outputs in self._outputs.values())

    def forget(self) -> None:
        if self._underway is not None:
            abandon(self._underway.captured)
            self.end_captures()
            self._underway = None
        self._wanted.clear()
        self._half_begun = None
        self._moved = self.moved_weights()
        self.table.forget(*STEPS)
        self.table.shared[_OWNER] = 0
        self._addresses.pop("captured", None)
        for outputs in self._outputs.values():
            outputs.release()
        if self._capturer is not None:
            self._capturer.take_new_pool()

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
        return self.table.captures("decode")

    @property
    def prefills(self) -> int:
        return self.table.captures("prefill") + self.table.captures("scoring")

    def repeated(self) -> int:
        """Return how many steps were captured again, or have to be."""
        lost = [entry for entry in list(self.table.entries.values()) if entry.losses and entry.key.phase != "sampling"]
        return len(lost) + (0 if self.ours else max(0, self.decodes() - self._expected))

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
