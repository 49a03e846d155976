"""Generation step by step: ``admit`` prompts, run ``step``, ``release`` rows."""

# A step is launched before the tokens of the previous step are read, so the device never waits for the host.
# Shapes: B rows, L tokens whose logits are wanted, V vocabulary.

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from compiled_llm.compilation.sampling.sampling import Sampling
from compiled_llm.execution.batch import Batch, Extension, ExtraInputs, Tap
from compiled_llm.execution.decode.deferred_sampling import Masks
from compiled_llm.execution.growth import sync_lengths
from compiled_llm.execution.limits import checked_prompt
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.pipeline import Pipeline, SampledTokens, Ticket
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kvcache.pool import Promise
from compiled_llm.kvcache.row import Row

_NOTHING: Mapping[Row, int] = {}
_INTEGERS = (torch.int64, torch.int32)
_NO_TOKENS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


class GenerateLoop:
    """A loop over a changing set of rows, each step exact; several of one model take turns in its decode buffers.

    Attributes:
        rows: the rows whose prompts have been admitted, in the order of ``step``'s forced tokens and ``logits``.
        steps: how many steps have been launched.
        promise: pages that the rows may take together, while a call holds it.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        self.model_runner = model_runner
        self._thread = model_runner.thread
        model_runner.expect_changes()
        self.rows: list[Row] = []
        self.steps = 0
        self.promise = Promise(model_runner.pool)
        self._pending: list[tuple[Row, NDArray[np.int64], Sampling | None]] = []
        self._computed: Tensor | None = None
        self._pipeline = Pipeline[None](model_runner, exact=True)
        self._every_row = Batch(decode=self.rows, promise=self.promise)  # the list is always the same
        self._masks: Callable[[], Masks] | None = None
        self._finalizer = weakref.finalize(self, _free, self.rows)

    @property
    def asynchronous(self) -> bool:
        """Whether a step may still be running when ``step`` returns; else reading late gains nothing."""
        return self.model_runner.device.type != "cpu"

    @property
    def prepared(self) -> bool:
        """Whether the next decode step can be launched at once: nothing has to be compiled or captured for it."""
        return self.model_runner.steps.is_ready(
            self._pipeline.persistent.step_for(self.rows, wants=self._every_row.wants)
        )

    # ---- the three verbs

    def admit(self, prompt: ArrayLike, max_new_tokens: int, sampling: Sampling | None = None) -> Row:
        """Queue a prompt; the next ``step`` prefills all queued prompts together.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: how many tokens the row may grow by; its pages are promised now.
            sampling: how it samples its tokens; greedily if None.

        Raises:
            ValueError: the prompt is empty or not of tokens of the model, ``max_new_tokens`` is negative, the model
                has too few positions for both or sees prompts both ways, or there would be more rows than
                ``max_batch_size``.
            OutOfPagesError: the pages it may need are not free; nothing was taken.
        """
        ids, stored = checked_prompt(self.model_runner, prompt, max_new_tokens)
        row = self.add_row(stored)
        self._pending.append((row, ids, sampling))
        return row

    def resume(
        self, row: Row, tokens: NDArray[np.int64], max_new_tokens: int, sampling: Sampling | None = None
    ) -> None:
        """Continue a row of this loop with more tokens ``[Q]``, at least one; otherwise as ``admit``."""
        row.reserve(row.exact_length + len(tokens) + max(0, max_new_tokens - 1))
        row.leave_slot()
        self._pending.append((row, tokens, sampling))

    def begin(self, logits: Tensor, settings: Sequence[Sampling | None]) -> None:
        """Continue all rows from logits ``[B, V]`` computed elsewhere: the next ``step`` samples from them."""
        self._computed = logits
        sync_lengths(self.rows)
        for row, sampling in zip(self.rows, settings, strict=True):
            row.leave_slot()
            self._pending.append((row, _NO_TOKENS, sampling))

    def step(self, forced: Tensor | None = None, fed: Mapping[Row, int] = _NOTHING) -> dict[Row, int]:
        """Launch one step and return the tokens of the previous one.

        If prompts are waiting, the step is their prefill; else it is a decode step of all rows.

        Args:
            forced: ``[B]`` int64, tokens for the rows to feed in, in the order of ``rows``, instead of their own.
            fed: what some rows feed in instead of their own tokens.

        Returns:
            The next token of each row that took part in the previous step; ``sampling.NOT_A_TOKEN`` for one that
            is drawn and whose logits cannot be drawn from.

        Raises:
            RuntimeError: there is nothing to run.
            ValueError: ``forced`` does not have one integer a row, or a row has as many tokens as the model positions.
            OutOfPagesError: a row has outgrown what it was promised, and no page is free; nothing has changed.
        """
        if forced is not None and not self._pending:
            self._check_tokens(forced)
        ticket = None
        if self._pipeline.persistent.step is not None and forced is None and not (fed or self._pending):
            ticket = self._thread.call_briefly(self._pipeline.repeat, self._every_row, None)
        if ticket is None:
            self._thread.call(self._launch, forced, fed, self._next_masks() if self._masks is not None else None)
        self.steps += 1
        return self._pipeline.read(_by_row) if len(self._pipeline.unread) > 1 else {}

    def launch(self, batch: Batch) -> Ticket[None]:
        """Launch a decode step of some of the rows; ``read`` it once the next step has been launched.

        Rows whose sampling is deferred cannot take part.

        Raises:
            RuntimeError: rows have no next tokens.
            OutOfPagesError: as ``step``.
        """
        ticket = None
        if self._pipeline.persistent.step is not None:
            ticket = self._thread.call_briefly(self._pipeline.repeat, batch, None)
        if ticket is None:
            ticket = self._thread.call(self._launch_batch, batch)
        self.steps += 1
        return ticket

    def start_reading(self, tokens: Tensor) -> None:
        """Have ``[B]`` int64, tokens of the first rows that were sampled elsewhere, on their way; ``read`` has them."""
        self._thread.call(self._pipeline.start_reading, self.rows[: len(tokens)], tokens, None)

    @property
    def unread(self) -> int:
        """How many steps were launched and not read."""
        return len(self._pipeline.unread)

    def read(self) -> SampledTokens:
        """Return the tokens of the oldest step not yet read, waiting for it."""
        return self._pipeline.read(_all)

    def release(self, row: Row) -> None:
        """Take a row out and give its pages back.

        Raises:
            ValueError: it is not one of this loop's.
        """
        if row not in self.rows:
            raise ValueError("release: the row is not one of this runner's; has it been released already?")
        self.rows.remove(row)
        self._pending = [entry for entry in self._pending if entry[0] is not row]
        row.free()

    def select(self, indices: Sequence[int]) -> None:
        """Replace the rows: each new one continues the old one at its index; pages are shared, not copied.

        Raises:
            ValueError: they are more than ``max_batch_size``; nothing has changed.
            OutOfStatesError: too few states are free; the rows are as they were.
        """
        self._check_room(len(indices))
        old = list(self.rows)
        copies = iter(_forks([old[index] for batch_index, index in enumerate(indices) if index != batch_index]))
        rows = [old[index] if index == batch_index else next(copies) for batch_index, index in enumerate(indices)]
        self.rows[:] = rows
        with self.promise.drawn_on():
            for row in old:
                if row not in rows:
                    row.free()

    def fork(self) -> GenerateLoop:
        """Return another loop with the same rows; pages are shared, not copied. OutOfStatesError as ``select``."""
        generate_loop = GenerateLoop(self.model_runner)
        generate_loop.rows += _forks(self.rows)
        return generate_loop

    # ---- around them

    @contextmanager
    def watched(self, taps: Sequence[Tap] = (), masks: Callable[[], Masks] | None = None) -> Iterator[None]:
        """Let ``taps`` watch each launch of the block."""
        # ``masks`` is called before deferred sampling, in the caller's thread, after all earlier tokens were returned.
        before = self._every_row, self._masks
        self._every_row, self._masks = self._every_row._replace(taps=taps), masks
        try:
            yield
        finally:
            self._every_row, self._masks = before

    def drain(self) -> dict[Row, int]:
        """Return the tokens of the oldest step not yet read, waiting for it; empty if there is none."""
        if self._pipeline.persistent.deferred:
            self._thread.call(self._pipeline.sample_late, self._next_masks())
        return self._pipeline.read(_by_row) if self._pipeline.unread else {}

    def let_taps_report(self) -> None:
        """Let watchers of all steps raise what these have shown, waiting for them."""
        for tap in self.model_runner.state.taps:
            self._thread.call(tap.report)

    def logits(self) -> Tensor:
        """Return ``[B, V]``, the last step's logits of the rows that took part, in the model's dtype."""
        return self._thread.call(self._last_logits)

    def close(self) -> None:
        """Release all rows; the loop can be used again."""
        self.model_runner.end_captures()
        self._finalizer()
        self._finalizer = weakref.finalize(self, _free, self.rows)
        self.rows.clear()
        self.restart()

    def end_step(self) -> None:
        """Make the next decode step anew, at the end of a call: one that may be repeated keeps the model alive."""
        if (step := self._pipeline.persistent.step) is not None:
            step.end()

    def restart(self) -> None:
        """Begin again with the rows as they are; forget prompts that wait and tokens that were not read."""
        self._pending.clear()
        self._computed = None
        self._pipeline.restart(self.rows)
        self.steps = 0

    def add_row(self, tokens: int) -> Row:
        """Add an empty row with pages promised for ``tokens``, for ``extend``; ValueError if there are too many.

        Raises:
            OutOfPagesError: the pages are not free; nothing was taken.
        """
        self._check_room(len(self.rows) + 1)
        row = Row(self.model_runner.pool, tokens)
        self.rows.append(row)
        return row

    def extend(
        self,
        rows: Sequence[Row],
        ids: Sequence[NDArray[np.int64]],
        positions: Sequence[NDArray[np.int64]],
        keep: NDArray[np.int64] | None = None,
        extras: Sequence[ExtraInputs | None] | None = None,
    ) -> Tensor:
        """Store and compute more packed tokens of some rows: ``[L, V]`` logits in the model's dtype, without a wait.

        Args:
            positions: the new tokens' rotary positions.
            keep: which packed tokens' logits are wanted; each row's last if None.
            extras: what rows have besides their ids; None if they have nothing.
        """
        extensions = [Extension(*extension) for extension in zip(rows, ids, positions, strict=True)]
        if extras is not None:
            both = zip(extensions, extras, strict=True)
            extensions = [extension._replace(extra=own) for extension, own in both]
        return self._thread.call(self._extend, extensions, keep)

    def fill(
        self,
        stored: NDArray[np.bool_],
        keys_and_values: Sequence[tuple[Tensor, Tensor] | None],
        positions: Sequence[int],
        states: Sequence[Tensor] = (),
    ) -> None:
        """Grow all rows by what was computed elsewhere, as ``RunnerState.write`` takes it.

        Args:
            stored: ``[B, C]``, which columns each row takes.
            keys_and_values: of each layer, ``[B, K, C', D]``; None of one that keeps none.
            positions: the rotary position of each row's next token.
            states: the rows' states afterwards, ``[B, ...]``, if rows have some.

        Raises:
            OutOfPagesError: the pages are not free; nothing has changed.
        """
        self._pipeline.persistent.invalidate()
        self._thread.call(self.model_runner.fill, self.rows, stored, keys_and_values, states, self.promise)
        for row, position in zip(self.rows, positions, strict=True):
            row.exact_position = position

    def stored(self, layer: int) -> list[tuple[Tensor, Tensor]]:
        """Return copies of a layer's keys and values for each row, each ``[K, length, D]``."""
        sync_lengths(self.rows)
        return self._thread.call(lambda: [self.model_runner.state.read(layer, row) for row in self.rows])

    def states(self) -> list[Tensor]:
        """Return copies of the rows' states, ``[B, ...]``, in the order of ``ModelFacts.states``."""
        return self._thread.call(self.model_runner.state.read_states, self.rows)

    def decode(self, tokens: Tensor, positions: Sequence[int] | None = None) -> Tensor:
        """Run one decode step of all rows with tokens ``[B]`` int64, and read nothing back."""
        # ``positions`` follow the rows' last if None. Returns ``[B, V]`` logits in the model's dtype, the caller's to
        # keep.
        return self._thread.call(self._decode, tokens, positions)

    def _check_room(self, rows: int) -> None:
        most = self.model_runner.max_batch_size
        if rows > most:
            raise ValueError(f"{rows} rows are more than max_batch_size={most}; wrap with a larger one")

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.shape != (len(self.rows),) or tokens.dtype not in _INTEGERS:
            raise ValueError(
                f"forced: one integer token for each of {len(self.rows)} rows is needed; got {tokens.dtype} "
                f"{list(tokens.shape)}"
            )

    def _next_masks(self) -> Masks | None:
        return self._masks() if self._masks is not None and self._pipeline.persistent.deferred else None

    # ---- in the executor

    def _launch(
        self,
        forced: Tensor | None,
        fed: Mapping[Row, int] = _NOTHING,
        masks: Masks | None = None,
    ) -> None:
        if not self.rows:
            raise RuntimeError("step: there are no rows; admit a prompt first")
        if self._pipeline.persistent.deferred.unsampled:
            self._pipeline.sample_late(masks)
        if fed:
            self.model_runner.state.slots.feed(fed)
        self._launch_next(forced)
        self._pending.clear()
        self._computed = None
        self.model_runner.run_capture_slices()

    def _launch_batch(self, batch: Batch) -> Ticket[None]:
        ticket = self._pipeline.launch(batch, None)
        self.model_runner.run_capture_slices()
        return ticket

    def _launch_next(self, forced: Tensor | None) -> None:
        if not self._pending:
            batch = self._every_row if forced is None else self._every_row._replace(tokens=forced)
            self._pipeline.launch(batch, None)
            return
        self._enter_settings()
        if self._computed is not None:
            rows, logits = list(self.rows), self._computed.clone()
            self.model_runner.graph_manager.check_model()
            self._pipeline.sample_from(rows, logits, self._every_row.taps, None)
            return
        extend = [Extension.of(row, ids) for row, ids, _ in self._pending]
        self._pipeline.launch(self._every_row._replace(decode=(), extend=extend), None)

    def _enter_settings(self) -> None:
        if new := [entry for entry in self._pending if entry[0].slot is None]:
            settings = [sampling and _beginning(sampling, row.exact_position + len(ids)) for row, ids, sampling in new]
            self.model_runner.admit([row for row, _, _ in new], settings)

    def _extend(self, extensions: Sequence[Extension], keep: NDArray[np.int64] | None) -> Tensor:
        self._pipeline.persistent.invalidate()
        self.model_runner.expect_changes()
        return self.model_runner.extend(extensions, self.promise, keep, self._every_row.taps)

    def _decode(self, tokens: Tensor, positions: Sequence[int] | None) -> Tensor:
        for row, position in zip(self.rows, positions or (), strict=positions is not None):
            row.exact_position = position
        self.model_runner.run(self._every_row._replace(tokens=tokens), self._pipeline.persistent)
        return self._last_logits()

    def _last_logits(self) -> Tensor:
        logits = self._pipeline.persistent.logits
        assert logits is not None, "no step has run"
        return logits.clone()


def _by_row(_: Ticket[None], tokens: SampledTokens) -> dict[Row, int]:
    return dict(zip(tokens.rows, tokens.tokens, strict=True))


def _all(_: Ticket[None], tokens: SampledTokens) -> SampledTokens:
    return tokens


def _beginning(sampling: Sampling, position: int) -> Sampling:
    """Return settings for an answer that has ``output_ids`` already, and whose next token has this position."""
    return sampling.starting_at(position - len(sampling.output_ids))


def _forks(rows: Sequence[Row]) -> list[Row]:
    """Return a fork of each row; OutOfStatesError if too few states are free, and there is none then."""
    forks: list[Row] = []
    try:
        for row in rows:
            forks.append(row.fork())  # noqa: PERF401  # those before an error are freed
    except BaseException:
        _free(forks)
        raise
    return forks


@deferred()
def _free(rows: list[Row]) -> None:
    for row in rows:
        row.free()
