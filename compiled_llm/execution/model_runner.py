"""A model on its device: ``run`` takes a batch of rows and returns their next tokens, without waiting for them."""

# Everything here runs in the model's executor.
# Shapes: T packed tokens, L tokens whose logits are wanted, V vocabulary.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compat.torch.gate import wait_for_device
from compiled_llm.compilation.artifacts.artifacts import Artifacts
from compiled_llm.compilation.graphs.captured_shapes import CapturedShapes
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.programs import Programs
from compiled_llm.compilation.sampling.sampling import Sampling, sample
from compiled_llm.config import KVScales, WrapConfig
from compiled_llm.execution.batch import Batch, Extension, StepOutput, Tap, last_tokens, rows_of
from compiled_llm.execution.decode.deferred_sampling import Masks, prepare_deferred
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.growth import grown, sync_lengths
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.prefill.mixed_steps import LEAST_WEIGHTS, MixedStep
from compiled_llm.execution.prefill.prefill import Prefill
from compiled_llm.execution.prefill.unpaged import Unpaged
from compiled_llm.execution.reporting.events import Events
from compiled_llm.execution.state.prefill_room import PrefillRoom
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.state.staging import Readbacks
from compiled_llm.execution.steps.decode_buffers import DecodeBuffers
from compiled_llm.execution.steps.dispatcher import Dispatcher
from compiled_llm.execution.steps.graph_manager import GraphManager
from compiled_llm.execution.steps.steps import Steps
from compiled_llm.execution.threads.executor import Executor
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kinds.scales import count_saturated, write_scales
from compiled_llm.kvcache.pool import Promise
from compiled_llm.kvcache.prefix_tree import PrefixTree
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.specs import token_bytes
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.inputs import vocabulary_of
from compiled_llm.model.sizes import attention_geometries, matrix_bytes, max_positions_of, weights_of_a_layer
from compiled_llm.model.weights.fused_weights import FusedWeights
from compiled_llm_ops import build_sampling

_NOTHING: Mapping[Row, Tensor] = {}


Uncompiled = Literal["compiling", "failed"]
"""Why answers run uncompiled: what they need is being compiled, or that has failed."""


class CompilingPrograms(Protocol):
    """A compiler of a model's programs while the same ones answer uncompiled."""

    @property
    def uncompiled(self) -> Uncompiled | None:
        """Why new answers run uncompiled; None if nothing was asked for, or all is there."""
        ...

    @property
    def admission_deadline(self) -> float:
        """Until when rows may come in while others run, on ``time.monotonic``'s clock; ``inf`` without a limit."""
        ...

    def begin(
        self,
        steps: Sequence[StepKey],
        rows: int | None = None,
        needs: Callable[[ModelRunner], object] | None = None,
    ) -> None:
        """Begin to compile prefill and these steps, too, which need what ``needs`` gives a model runner."""

    def let_take_over(self, graph_manager: GraphManager) -> None:
        """Replace the programs that run uncompiled, if others are ready; no row runs."""
        ...


class ModelRunner:
    """A runner of the batches of schedulers.

    Attributes:
        max_batch_size: most rows of one call; schedulers that know of more room may run more.
        prefixes: pages of texts that engines keep; one tree for all of them, since a page is in one tree.
        compiling: compiles programs while others answer uncompiled; None if calls wait for that.
    """

    def __init__(
        self,
        facts: ModelFacts,
        config: WrapConfig,
        thread: Executor,
        events: Events | None = None,
        programs: Programs | None = None,
        max_rows: int = 0,
        weights: FusedWeights | None = None,
        artifacts: Artifacts | None = None,
        compiling: CompilingPrograms | None = None,
        states: int | None = None,
    ) -> None:
        """Allocate pages and buffers; nothing is compiled yet.

        Args:
            max_rows: make room for so many rows, if that is more than ``config`` says.
            weights: those that an earlier runner has fused.
            states: have as many entries for states of rows; what ``config`` has room for if None.

        Raises:
            ValueError: not even one page fits into the memory allowed.
        """
        model = facts.model
        self.max_batch_size = config.max_batch_size
        self.config = config = replace(config, max_batch_size=max(max_rows, config.max_batch_size))
        self.device = model.device
        self.thread = thread
        self.events = Events() if events is None else events
        self._facts = facts
        self.compiling = compiling
        weights = _laid_out(facts, config, thread) if weights is None else weights
        self.max_positions = max_positions_of(model)
        self._matrix_bytes = matrix_bytes(model)
        shapes = _shapes_of(facts, config, self.max_positions)
        room = PrefillRoom.of_all(facts.layers, config, self.device, self.max_positions, shapes.all())
        self.state = RunnerState(facts, config, self.max_positions, room.pages, states)
        self.pool = self.state.pool
        self._token_bytes = sum(map(token_bytes, self.state.specs))
        self.prefixes = PrefixTree(self.pool)
        self.readbacks = Readbacks()
        self._planner = _planner_of(self.state, room, shapes)
        self.graph_manager = GraphManager(self.state, weights, thread, self.events, programs, artifacts)
        build_sampling(self.vocabulary, model.dtype, self.device)  # then: programs have chosen what Triton builds with
        dispatcher = Dispatcher(self.state.step_table, self._planner.schedules[0], shapes.spare)
        self.decode_buffers = DecodeBuffers(self.state, self.graph_manager, self._planner)
        self.steps = Steps(self.state, self.graph_manager, dispatcher, self.decode_buffers)
        self.prefill = Prefill(self.state, self.graph_manager, self._planner, shapes, self.steps)
        self.unpaged = Unpaged(self.state, self.graph_manager)
        self.parts: dict[str, Any] = {}  # what features have allocated on the device, with its ``nbytes``, by name
        # what features have prepared ahead, by name: each prepares it on another runner, made after sleep
        self.prepared: dict[str, Callable[[ModelRunner], None]] = {}
        self._values: int | None = None  # of the model that computed ``prefixes``; None before the first check

    # ---- run

    def admit(
        self, rows: Sequence[Row], settings: Sequence[Sampling | None], answering: Callable[[], bool] = lambda: False
    ) -> None:
        """Give slots to rows that are about to run, as ``Slots.admit``."""
        # If no other row runs, programs that were compiled meanwhile take over from those that run uncompiled; none if
        # an answer that has begun is ``answering`` in these rows or later ones.
        if self.compiling is not None and self.graph_manager.eager and self.state.slots.empty and not answering():
            self.compiling.let_take_over(self.graph_manager)
        self.state.slots.admit(rows, settings)

    def expect_changes(self) -> None:
        """Note that code of the user's may have changed the model: the next step checks it, and repeats no other."""
        self._facts.version.expect_changes()
        self.state.validity.invalidate()

    def run(self, batch: Batch, persistent: PersistentBatch) -> StepOutput:
        """Run a batch, of rows that are not yet grown by their new tokens, without waiting for it.

        Raises:
            OutOfPagesError: a row has outgrown what it was promised, and no page is free; nothing has changed.
            ValueError: a row would have more tokens than the model has positions; nothing has changed.
        """
        if self.state.step_table.pending:
            self.graph_manager.cuda_graphs.adopt()
        if batch.extend:
            return self._extend(batch, persistent)
        if (step := persistent.step) is not None and step.is_valid_for(batch):
            return step.launch(batch, persistent.discard_after_failure)
        return self._decode(batch, persistent)

    def _decode(self, batch: Batch, persistent: PersistentBatch) -> StepOutput:
        rows, drafting = batch.decode, batch.drafting
        new = 1 if drafting is None else drafting.new_tokens
        self.state.slots.ensure(rows)
        if drafting is not None:
            drafting.entering(rows)
        if batch.tokens is None:
            _check_next(rows)
        counts = [new] * len(rows)
        self._check_positions(rows, counts)  # first: to prepare a step, padding feeds in as many tokens
        wanted = persistent.step_for(rows, batch.wants if batch.taps else (), drafting)
        launch = self.steps.ready(wanted, waiting=len(rows), exact=persistent.exact)
        period = self.state.validity.period
        with grown(rows, counts, batch.promise, self.state.copy_pages) as copied:
            try:
                persistent.place(rows, launch, copied)
                if batch.tokens is not None:
                    self.decode_buffers.feed(len(rows), launch.key, batch.tokens)
                self.state.arena.flush()
                if batch.taps:
                    persistent.deferred.begin(rows, batch.taps)
                outputs = launch()
            except BaseException:  # the decode buffers may have advanced
                persistent.discard_after_failure(rows)
                raise
        if batch.taps:
            spans = last_tokens(rows, new)
            for tap in batch.taps:
                tap.launched(spans, outputs)
        output = persistent.commit(rows, launch, period, batch)
        if batch.taps or persistent.deferred.deferring:
            persistent.deferred.add(output, batch.taps, new if output.accepted is not None else 1)
        return output

    def can_mix(self, decode: Sequence[Row], extend: Sequence[Extension]) -> bool:
        """Return whether one launch can run ``decode`` and ``extend``, whose rows are not yet grown."""
        queries = [1] * len(decode) + [len(extension.ids) for extension in extend]
        rows = [*decode, *rows_of(extend)]
        lengths = [row.length_at_most + count for row, count in zip(rows, queries, strict=True)]
        return bool(decode and extend) and self.prefill.shapes.is_one_launch(queries, lengths)

    @property
    def mixing_may_pay(self) -> bool:
        """Whether one launch of prompts and running rows is ever known to be faster than two."""
        return self.device.type == "cuda" and self._matrix_bytes >= LEAST_WEIGHTS

    def mixing_pays(self, decode: Sequence[Row], extend: Sequence[Extension]) -> bool:
        """Return whether one launch, if ``can_mix`` allows it, is known to be faster than two."""
        if not self.mixing_may_pay:
            return False
        queries = [len(extension.ids) for extension in extend]
        alone, together = (self.prefill.shapes.tokens_computed(of) for of in (queries, [1] * len(decode) + queries))
        kept = sum(row.length_at_most for row in decode) * self._token_bytes
        return MixedStep(self._matrix_bytes, alone, together, kept).pays

    def _as_one_launch(self, batch: Batch) -> Batch:
        """Return the batch with its decoding rows as rows of the prefill, with one new token each."""
        self.state.slots.ensure([*batch.decode, *rows_of(batch.extend)])
        _check_next(batch.decode)
        return batch._replace(decode=(), extend=[*map(Extension.of_next, batch.decode), *batch.extend])

    def _extend(self, batch: Batch, persistent: PersistentBatch) -> StepOutput:
        if batch.mixed:
            batch = self._as_one_launch(batch)
        rows = rows_of(batch.extend)
        ending = [cast(Row, extension.row) for extension in batch.extend if extension.is_last]
        persistent.invalidate_rows(rows)
        with self._grown_by(batch.extend, batch.promise):
            decoded = self._decode(batch, persistent) if batch.decode else None
            # Captured graphs share memory for what they compute: a replayed prefill may overwrite what decode returned.
            sampled = None if decoded is None else decoded.tokens.clone()
            self.state.slots.ensure(rows)
            persistent.deferred.begin(ending, batch.taps)
            try:
                logits, tokens, _ = self.prefill.run(
                    batch.extend, exact=persistent.exact, taps=batch.taps, pooling=batch.pooling
                )
            except BaseException:
                if batch.mixed:  # it may have sampled tokens of rows that go on
                    persistent.discard_after_failure(rows)
                raise
        extended = StepOutput(ending, logits, tokens)
        persistent.record_sampled(extended)
        if extended.rows:
            persistent.deferred.add(extended, batch.taps)
        if decoded is None or sampled is None:
            return extended
        rows = [*decoded.rows, *extended.rows]
        return StepOutput(rows, None, torch.cat([sampled, tokens]), accepted=decoded.accepted)

    def extend(
        self,
        extensions: Sequence[Extension],
        promise: Promise | None = None,
        keep: NDArray[np.int64] | None = None,
        taps: Sequence[Tap] = (),
    ) -> Tensor:
        """Run new tokens of rows, not yet grown, and return ``[L, V]`` logits, with no sampled tokens to remember."""
        # ``keep`` is ``[L]`` ascending, the packed tokens whose logits are wanted, None for the last of each row.
        # OutOfPagesError as ``run``.
        self.graph_manager.cuda_graphs.adopt()
        rows = rows_of(extensions)
        with self._grown_by(extensions, promise):
            logits = self.prefill.run(extensions, keep, remember=False, exact=True, taps=taps).logits
        self.state.slots.forget_next(rows)
        return logits

    def fill(
        self,
        rows: Sequence[Row],
        stored: NDArray[np.bool_],
        keys_and_values: Sequence[tuple[Tensor, Tensor] | None],
        states: Sequence[Tensor],
        promise: Promise | None = None,
        ids: Sequence[NDArray[np.int64]] | None = None,
    ) -> None:
        """Grow rows, and write what was computed elsewhere by ``RunnerState.write``; OutOfPagesError as ``run``."""
        self.graph_manager.check_pages()
        sync_lengths(rows)
        with grown(rows, stored.sum(axis=1).tolist(), promise, self.state.copy_pages):
            self.state.write(rows, stored, keys_and_values, states, ids)

    def sample(
        self, rows: Sequence[Row], logits: Tensor, persistent: PersistentBatch, taps: Sequence[Tap] = ()
    ) -> StepOutput:
        """Sample the next tokens of rows, which hold all tokens before, from logits ``[B, V]`` computed elsewhere."""
        state = self.state
        state.slots.ensure(rows)
        state.arena.flush()
        slots, positions = state.staging.to_device(
            [state.slots.of(rows, len(rows)), np.array([row.exact_position for row in rows], dtype=np.int64)]
        )
        persistent.deferred.begin(rows, taps)
        step = StepOutput(rows, logits, sample(logits, slots, positions, state.slots.tables))
        persistent.record_sampled(step)
        return persistent.deferred.add(step, taps)

    def sample_deferred(
        self, persistent: PersistentBatch, masks: Masks | None = None, processed: Mapping[Row, Tensor] = _NOTHING
    ) -> StepOutput:
        """Sample for the rows whose sampling is deferred, as ``DeferredSampling.run``, and wait for nothing."""
        return persistent.deferred.run(masks, processed)

    def prepare_deferred(self, buckets: Sequence[int] = ()) -> None:
        """Compile the kernels of deferred sampling, and on CUDA capture those of ``buckets`` rows; no loop runs."""
        # Other numbers of rows are launched one kernel after the other.
        self.graph_manager.check_model()
        self.end_captures()
        prepare_deferred(self.state, self.steps.sampling_graphs, buckets)

    @contextmanager
    def _grown_by(self, extensions: Sequence[Extension], promise: Promise | None) -> Iterator[None]:
        """Grow rows by their new tokens for the block, and once it has succeeded, set their positions."""
        rows, counts = rows_of(extensions), [len(extension.ids) for extension in extensions]
        sync_lengths(rows)
        self._check_positions(rows, counts)
        with grown(rows, counts, promise, self.state.copy_pages):
            yield
        for row, extension in zip(rows, extensions, strict=True):
            row.exact_position = int(extension.positions[-1]) + 1

    def _check_positions(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        both = list(zip(rows, counts, strict=True))
        if max([row.length_at_most + count for row, count in both]) <= self.max_positions:
            return
        max_row_tokens = max([row.exact_length + count for row, count in both])
        if max_row_tokens > self.max_positions:
            raise ValueError(
                f"a row cannot grow to {max_row_tokens} tokens: the model has {self.max_positions} positions; "
                "release the row"
            )

    # ---- around it

    def forget_changed(self) -> bool:
        """Forget texts if the model may have computed something else before this check; True if it may have."""
        # Called after ``check_model``, before anyone gets what the step computes.
        before, self._values = self._values, self._facts.version.values
        changed = before not in (None, self._values)
        if changed:
            self.prefixes.clear()
        return changed

    def saturated(self) -> int:
        """Return how many numbers were clamped on their way into pages; waits for the device."""
        return count_saturated(self.state.scales)

    def set_kv_scales(self, scales: KVScales) -> None:
        """Have other scales of pages; no row has pages, and what engines keep of texts is forgotten."""
        self.end_captures()
        write_scales(self.state.scales, scales)
        self.prefixes.clear()

    def is_of(self, model: PreTrainedModel) -> bool:
        """Return whether this runs ``model``, as it is now or as it was."""
        return self._facts.reference() is model

    def give_back_pages(self) -> None:
        """Give the memory of pages and states back, while there are no rows and engines keep no texts."""
        # What CUDA graphs have of their addresses stays true. Nothing runs until ``take_pages_again``.
        self.end_captures()
        wait_for_device(self.device)
        self.graph_manager.has_pages = False
        self.prefixes.clear()  # with what is kept beside them
        self.state.kv_memory.give_back()

    def take_pages_again(self) -> None:
        """Have as many pages as before, all empty; torch.OutOfMemoryError if the device has too little memory."""
        self.state.kv_memory.take_again()
        self.graph_manager.has_pages = True

    def release(self) -> None:
        """Give device memory back, even if this is still referenced; it has no rows, and nothing runs afterwards."""
        self.end_captures()
        wait_for_device(self.device)
        self.graph_manager.release()
        self.steps.sampling_graphs.release()
        self.prefill.packer.extra_memory.release()
        self.state.release()
        self._planner.release()
        self.parts.clear()

    def run_capture_slices(self, ended: Callable[[], bool] = lambda: True, settled: bool = True) -> None:
        """Run a time slice of pending captures, after a launch, and further ones until their time has ``ended``."""
        # ``settled`` if the steps to come are likely to be as the last one.
        if self.state.step_table.pending:
            self.graph_manager.run_capture_slices(ended, settled)

    def catch_up(self, wanted: Callable[[], object]) -> None:
        """Run pending captures while no step is to run, until something is ``wanted``."""
        while self.graph_manager.cuda_graphs.background_captures and not wanted():
            self.thread.call(self.run_capture_slices)
            self.thread.call(self.graph_manager.cuda_graphs.adopt)

    @deferred()
    def end_captures(self) -> None:
        """End pending captures: a thread that runs no steps may wait for the device, which no capture survives."""
        self.graph_manager.cuda_graphs.end_captures()

    @property
    def windows(self) -> tuple[int, ...]:
        """The tokens that layers with sliding windows see, a query itself included."""
        return self._facts.windows

    @property
    def vocabulary(self) -> int:
        return vocabulary_of(self._facts.model)

    @property
    def uncompiled(self) -> Uncompiled | None:
        """Why new answers run uncompiled; None if they do not, or ``mode`` says so."""
        return self.compiling.uncompiled if self.compiling is not None and self.graph_manager.eager else None

    @property
    def _buffer_bytes(self) -> int:
        parts = self.decode_buffers, self.steps.sampling_graphs, self.prefill.packer.extra_memory
        return self.state.buffer_bytes + sum(part.nbytes for part in parts)

    def memory(self) -> dict[str, int]:
        """Return what each part takes of the device's memory, in bytes."""
        model = self._facts.model
        weights = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        scores = self.state.scores
        return {
            "weights": sum(weights.values()),
            "pages": self.state.page_bytes,
            "workspace": self._planner.workspace_bytes,
            "buffers": self._buffer_bytes,
            "graphs": self.graph_manager.cuda_graphs.nbytes,
            **({} if scores is None else {"scores": scores.limit}),
            **({} if not self.state.states else {"states": self.state.state_bytes}),
            **{name: part.nbytes for name, part in self.parts.items()},
        }


def _check_next(rows: Sequence[Row]) -> None:
    for row in rows:
        if not row.has_next:
            raise RuntimeError("step: the rows have no next tokens; give them as forced tokens")


def _laid_out(facts: ModelFacts, config: WrapConfig, thread: Executor) -> FusedWeights:
    """Lay weights that are multiplied as one side by side, if they are to be."""
    fuses = config.fuses_on(facts.model.device.type)
    with facts.attention.moving_weights(thread.caller):
        weights = FusedWeights(facts.model, facts.fused_groups if fuses else [])
        if fuses:
            facts.lay_stand_ins_out()
    return weights


def _planner_of(state: RunnerState, room: PrefillRoom, shapes: CapturedShapes) -> Planner:
    """Return what plans attention, of layers whose back end has plans."""
    facts, config, kind = state.facts, state.config, state.device.type
    chosen = config.backend_on(kind)
    geometries = attention_geometries(facts.layers, config.page_size, state.dtype)
    specs = [
        spec.planned(geometry) if layer.kind.has_plan(chosen) else None
        for layer, spec, geometry in zip(facts.layers, state.specs, geometries, strict=False)
    ]
    planner = Planner(
        specs,
        config,
        state.device,
        max_row_tokens=state.max_positions,
        room=room,
        shapes=shapes.all() if config.captures_on(kind) else [],
        expands=None if config.batch_invariant else facts.expands,  # decode steps absorb, so prefills do
    )
    planner.load()
    return planner


def _shapes_of(facts: ModelFacts, config: WrapConfig, max_positions: int) -> CapturedShapes:
    """Return the shapes of a model's prefills."""
    weights = weights_of_a_layer(facts.model, len(facts.layers))
    query_width = sum(layer.query_heads * layer.head_dim for layer in facts.layers) // len(facts.layers)
    return CapturedShapes(config.max_batch_size, weights, max_positions, config.prefill_tokens, query_width)
