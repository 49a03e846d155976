"""Makes a model's runner when it is needed, makes it again when the model has moved, and gives it back for sleep."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from compiled_llm.compat.torch.dynamo import switched_off
from compiled_llm.compilation.artifacts.artifacts import Artifacts
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.config import KVScales, WrapConfig
from compiled_llm.execution.batch import ExtraInputs
from compiled_llm.execution.lifecycle.background_compilation import BackgroundCompilation
from compiled_llm.execution.lifecycle.kept import CompiledParts
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.prefill.packing import NO_ROWS
from compiled_llm.execution.reporting.events import Events
from compiled_llm.execution.reporting.progress import ProgressDisplay, TaskNumber
from compiled_llm.execution.threads.executor import executor_for
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm.kvcache.memory import reserved_bytes
from compiled_llm.model.checks import check_layers, check_placement
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.version.model_version import Placement
from compiled_llm.model.weights.host_weights import HostWeights


class Holder(Protocol):
    """An object that refers to the model runner."""

    def let_go(self) -> None:
        """Drop the reference, unless requests run on it: the model runner is about to be made again."""


class ModelRunnerLifecycle:
    """The owner of a model's ``ModelRunner``."""

    def __init__(
        self,
        facts: ModelFacts,
        config: WrapConfig,
        events: Events,
        holders: Iterable[Holder],
        artifacts: Artifacts | None = None,
    ) -> None:
        """Allocate nothing yet; a runner gets all of the room for rows that ``artifacts`` have."""
        self._facts = facts
        self._config = config
        self._events = events
        self._holders = holders
        self._artifacts = artifacts
        self._max_rows = config.max_batch_size if artifacts is None else artifacts.rows
        self.present: ModelRunner | None = None  # None before the first use, and asleep
        # What must not change: where the model is, of what type, and the hooks compiled into its graphs.
        self._made_for: tuple[Hashable, ...] = ()
        self._resting: ModelRunner | None = None  # asleep: all of it but its pages is on the device
        self._allocation = threading.Lock()
        self.asleep = False  # whether it was given back, until ``wake``
        self._kept: CompiledParts | None = None
        self._weights: HostWeights | None = None
        eager_first = config.eager_first_on(facts.model.device.type) and switched_off() is None
        # compiles while answers run uncompiled; None if calls wait for it
        self.compiling = BackgroundCompilation(facts, config) if eager_first else None

    @property
    def rows(self) -> int:
        """How many rows the model runner has room for, or will have."""
        return self._max_rows

    def make_room(self, rows: int) -> None:
        """Have room for so many rows; a runner that has less is made again when it is next needed."""
        self._max_rows = max(self._max_rows, rows)

    @property
    def facts(self) -> ModelFacts:
        """Those of the model at the last ``placement``."""
        return self._facts

    def placement(self) -> Placement:
        """Return the model's placement at this moment, for which the ``facts`` hold: probes run again if need be."""
        placement = self._facts.version.placement  # first: it finds other modules
        if self._weights is None and not self._facts.hold:
            with self._allocation:
                self._learn()
        return placement

    def _learn(self) -> None:
        """Run the model's probes again, unless another thread has; a model runner of other facts is made again."""
        before = self._facts
        if before.hold:
            return
        if self.present is not None:
            self.present.thread.call(self.present.end_captures)  # probes wait for the device
        self._facts = before.learnt_again(self._config.layer_functions)
        if self._facts.layers is not before.layers:
            self._made_for, self._kept = (), None
            if self.compiling is not None:
                self.compiling.learn(self._facts)

    def current(self, placement: Placement | None = None) -> ModelRunner:
        """Return the model runner; made at the first call, and again if the model was moved, converted or hooked."""
        # And if its config says that it has more positions than before, or more rows are to have room. ``placement`` is
        # that of the model at this moment, if the caller has just asked for it: to find it, all modules are walked.
        # RuntimeError if it is asleep.
        if self.asleep:
            raise RuntimeError("the model is asleep, and has no pages; call wake() on its engine")
        return self._current(placement)

    def _current(self, placement: Placement | None = None) -> ModelRunner:
        made_for = placement or self.placement()
        if (refused := self._facts.refused) is not None:
            raise UnsupportedModelError(str(refused), refused.cause)
        with self._allocation:
            model_runner = self.present
            if model_runner is None or not self._still_fits(model_runner, made_for):
                if model_runner is not None:
                    self._events.started_again()
                    self._count_saturated(model_runner)
                    model_runner.graph_manager.beside.drop()
                model_runner = self.present = None  # its memory goes back first
                for holder in list(self._holders):
                    holder.let_go()
                self._facts.version.let_go()
                check_placement(self._facts.model, self._config)
                check_layers(self._facts.model, self._facts.layers, self._config)
                model_runner = self._new(made_for)
                self.present, self._made_for, self._kept = model_runner, made_for, None
            return model_runner

    def is_current(self, model_runner: ModelRunner, placement: Placement | None = None) -> bool:
        """Return whether ``model_runner`` is that of the model as it is now, as for ``current``; makes none."""
        if model_runner is not self.present:
            return False
        return self._still_fits(model_runner, placement or self.placement())

    def _still_fits(self, model_runner: ModelRunner, made_for: tuple[Hashable, ...]) -> bool:
        return (
            made_for == self._made_for
            and self._facts.max_positions <= model_runner.max_positions
            and self._max_rows <= model_runner.config.max_batch_size
        )

    def _new(self, made_for: tuple[Hashable, ...]) -> ModelRunner:
        config, kept, thread = self._config, self._kept, executor_for(self._facts.model.device, self._config)
        if kept is not None and not kept.fits(made_for, self._max_rows, self._facts.max_positions):
            self._events.started_again()
            kept = None
        if kept is not None:
            config = kept.configured(config)
        return thread.call(
            ModelRunner,
            self._facts,
            config,
            thread,
            self._events,
            programs=None if kept is None else kept.programs,
            max_rows=self._max_rows,
            weights=None if kept is None else kept.weights,
            artifacts=self._artifacts,
            compiling=self.compiling,
            states=None if kept is None else kept.states,
        )

    def set_kv_scales(self, scales: KVScales) -> None:
        """Have other scales of pages from now on; RuntimeError if rows have pages, and nothing has changed."""
        self._check_no_pages_used("set_kv_scales")
        self._config = dataclasses.replace(self._config, kv_scales=scales)
        if (model_runner := self.present or self._resting) is not None:
            model_runner.thread.call(model_runner.set_kv_scales, scales)

    def _count_saturated(self, model_runner: ModelRunner) -> None:
        """Keep a count of a model runner that is about to go."""
        self._events.kv_saturated += model_runner.thread.call(model_runner.saturated)

    def separate_weights(self) -> None:
        """Give each fused weight its own memory again, on the device."""
        self.rise()
        if self.present is not None:
            self.present.thread.call(self.present.graph_manager.separate_weights)
        elif self._kept is not None:
            with self._moving_weights():
                self._kept.weights.separate()
                self._facts.separate_stand_ins()
            self._kept = None

    # ---- asleep

    @deferred()
    def sleep(self, weights: bool, graphs: bool) -> int:
        """Give pages back, and return how many bytes; a model that is asleep may still give CUDA graphs and weights.

        No loop runs, and none begins meanwhile.

        Args:
            weights: move these to host memory, too, and give CUDA graphs back, which have their addresses.
            graphs: give back all but the weights and the compiled programs.

        Raises:
            RuntimeError: rows have pages; nothing has changed.
            ValueError: a weight cannot be moved; nothing has changed.
        """
        self._check_no_pages_used("sleep")
        device = self._facts.model.device
        before = self._taken_on(device)
        moves = weights and not is_host(device)
        if self.present is not None and (moves or graphs):
            self.present.graph_manager.beside.drop()
        if moves and self._weights is None:
            with self._moving_weights("moving weights to host memory"):
                self._weights = HostWeights(self._facts.model, device)
            self._facts.drop_stand_ins()
        if moves or graphs or (self.present is not None and not self.present.state.kv_memory.keeps_addresses):
            self._release()
        elif self.present is not None:
            self.present.thread.call(self.present.give_back_pages)
            self.present, self._resting = None, self.present
        self.asleep = True
        return max(0, before - self._taken_on(device))

    @deferred()
    def wake(self) -> None:
        """Bring weights, pages and the CUDA graphs that were ready back to the device; nothing is compiled again."""
        # If it fails or is interrupted, the model is asleep; its weights may be back already.
        self._bring_weights_back()
        if self._resting is not None:
            self._resting.thread.call(self._resting.take_pages_again)
            self.present, self._resting = self._resting, None
        kept = self._kept
        if self.asleep and self.present is None and kept is not None:
            try:
                model_runner = self._current()
                prepare(model_runner, kept.decodes, [kept.shapes], kept.extras)
                if kept.samplings:
                    model_runner.thread.call(model_runner.prepare_deferred, kept.samplings)
                for prepare_again in kept.prepared:
                    prepare_again(model_runner)
            except BaseException:
                self._release()
                self._kept = kept
                raise
        self.asleep = False

    @deferred()
    def rise(self) -> None:
        """Be awake with only the weights on the device: the next call makes the rest."""
        self._bring_weights_back()
        if self.asleep:
            self._release()
        self.asleep = False

    def check_weights(self) -> None:
        """Check that the weights are on their device; RuntimeError if they wait in host memory."""
        if self._weights is not None:
            raise RuntimeError("the model is asleep, and its weights are in host memory; call wake() on its engine")

    def _check_no_pages_used(self, call: str) -> None:
        if self._used_pages:
            gc.collect()  # of caches that are no longer reachable
        if used := self._used_pages:
            raise RuntimeError(
                f"{call}: caches hold {used} pages of the model (those of earlier outputs); drop them or "
                f"close() them, and call {call} again"
            )

    @property
    def _used_pages(self) -> int:
        return 0 if self.present is None else self.present.pool.account().used

    def _release(self) -> None:
        """Give the model runner back, even if it is still referenced; keep all that takes no device memory."""
        model_runner = self.present or self._resting
        self.present = self._resting = None
        if model_runner is not None:
            self._kept = CompiledParts.of(model_runner, self._made_for)
            self._count_saturated(model_runner)
            model_runner.thread.call(model_runner.release)
        del model_runner
        gc.collect()  # leftovers of tracing refer to the buffers
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _bring_weights_back(self) -> None:
        if self._weights is not None:
            with self._moving_weights("moving weights to the device"):
                self._weights.come_back(self._facts.model)
            self._weights = None

    @contextmanager
    def _moving_weights(self, doing: str = "") -> Iterator[None]:
        display = ProgressDisplay(self._config.progress and bool(doing))
        with self._facts.attention.moving_weights(threading.get_ident()), display.task(doing):
            yield

    def _taken_on(self, device: torch.device) -> int:
        """Bytes that the process takes on a device; on a CPU, those of the model without its weights."""
        if not is_host(device):
            return reserved_bytes(device)
        model_runner = self.present or self._resting
        memory = {} if model_runner is None else model_runner.memory()
        return sum(nbytes for name, nbytes in memory.items() if name != "weights")


def is_host(device: torch.device) -> bool:
    return device.type == "cpu"


def prepare(
    model_runner: ModelRunner,
    decodes: Sequence[StepKey],
    captured: Iterable[Sequence[StepKey]],
    extras: Sequence[ExtraInputs] = (),
    report: Callable[[str], None] = lambda doing: None,
    anchors: bool = True,
) -> None:
    """Compile, and on CUDA capture, all of these that are not ready yet."""
    # ``extras`` are those of no tokens, of programs that read more than ids; ``anchors`` are a few CUDA graphs in
    # which all others could run.
    thread, prefill, steps = model_runner.thread, model_runner.prefill.launches, model_runner.steps
    missing = [step for step in decodes if not steps.is_ready(step)]
    total = len(missing) + (not prefill.is_ready)
    report("preparing prefill")
    thread.call(prefill.make_ready, number=_number(1, total), anchors=anchors)
    for extra in extras:
        thread.call(prefill.make_ready, NO_ROWS._replace(extra=extra), anchors=anchors)
    for number, step in enumerate(decodes, start=1):
        report(f"preparing steps of {step.rows} request{'s' * (step.rows > 1)} ({number} of {len(decodes)})")
        at = total - len(missing) + missing.index(step) + 1 if step in missing else 0
        thread.call(steps.ready, step, number=_number(at, total), anchors=anchors)
    for shapes in filter(None, captured):
        report(f"preparing prefills of up to {max(shape.tokens for shape in shapes)} tokens")
        thread.call(prefill.capture_shapes, shapes, only_with_room=True)


def _number(at: int, total: int) -> TaskNumber | None:
    """The number of a preparation among all; None if there are no others, or it is none of them."""
    return TaskNumber(at, total) if at and total > 1 else None
