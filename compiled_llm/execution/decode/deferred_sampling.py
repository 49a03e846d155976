"""Tokens that are sampled after the launch that computed their logits: the host looks at earlier tokens first."""

# The logits of such rows are copied after each launch, since later launches overwrite them. ``DeferredSampling.run``
# samples from them, for all these rows in one launch, and waits for nothing.
# Shapes: D rows, V vocabulary, n rows that get a mask.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.sampling.sampling import sample
from compiled_llm.execution.batch import StepOutput, Tap
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.steps.launch import Launch
from compiled_llm.execution.steps.sampling_graphs import SamplingGraphs
from compiled_llm.execution.steps.steps import Steps
from compiled_llm.kvcache.row import Row

_NOTHING: Mapping[Row, Tensor] = {}


class Masks(NamedTuple):
    """The tokens that rows may sample next."""

    rows: Sequence[Row]  # those that have ended are left out
    # ``[n, words]`` int32, a bit for each token, the lowest first: 0 bars it, and so does a missing word
    bits: NDArray[np.int32]


_NewMasks = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Slots, and the masks ``[n, words]`` of their rows."""


class _Unsampled(NamedTuple):
    """Rows of a launch whose tokens are not sampled yet, with a copy of their logits ``[D, V]``."""

    rows: Sequence[Row]
    logits: Tensor
    taps: Sequence[Tap]


class _Division(NamedTuple):
    """The rows of a launch, divided into those that are sampled later and the others."""

    all_rows: Sequence[Row]
    deferred: list[Row]
    plain: list[Row]
    # indices of the deferred ones and of the plain ones, on the device; None if all are of one kind
    places: list[Tensor] | None


class DeferredSampling:
    """The rows of one loop whose tokens are not sampled yet."""

    def __init__(self, state: RunnerState, steps: Steps) -> None:
        self._state, self._steps, self._graphs = state, steps, steps.sampling_graphs
        self.unsampled: list[_Unsampled] = []  # these rows, by launch
        self.deferring = state.slots.deferring  # the slots of rows whose sampling is deferred, of any loop
        self._last = _Division((), [], [], None)  # the next launch mostly has the same rows

    def __bool__(self) -> bool:
        return bool(self.unsampled)

    @property
    def rows(self) -> list[Row]:
        """The rows, in the order of their launches."""
        return [row for part in self.unsampled for row in part.rows]

    def logits_of(self, row: Row) -> Tensor:
        """Return ``[V]``, a copy, in the model's dtype, of the logits of the row's next token, or raise ValueError."""
        for part in self.unsampled:
            if row in part.rows:
                return part.logits[part.rows.index(row)].clone()
        raise ValueError("logits_of: the row has no token that waits to be sampled")

    def defers(self, rows: Sequence[Row]) -> bool:
        """Whether one of the rows is sampled later than it is launched."""
        return bool(self.deferring) and any(row.slot in self.deferring for row in rows)

    def forget(self) -> None:
        self.unsampled = []
        self._last = _Division((), [], [], None)
        self._graphs.give_room_back(self)

    # ---- add

    def begin(self, rows: Sequence[Row], taps: Sequence[Tap]) -> None:
        """Let the taps look at the rows, with slots, of a launch that samples now, before it does; ``add`` follows."""
        if now := self._division(rows).plain if self.deferring else rows:
            for tap in taps:
                tap.sampling(now)

    def add(self, step: StepOutput, taps: Sequence[Tap], each: int = 1) -> StepOutput:
        """Keep the logits of rows that are sampled later, show the others to the taps, and return the step."""
        # The step has ``each`` logits of every row, the first of which are those of the row's next token.
        if not self.deferring:
            return _shown(step, taps)
        division = self._division(step.rows)
        if not division.deferred:
            return _shown(step, taps)
        assert step.logits is not None, "a step of one launch"
        if division.places is not None and taps:
            plain = division.places[1]
            logits, tokens = (
                own.unflatten(0, (-1, each)).index_select(0, plain).flatten(0, 1) for own in (step.logits, step.tokens)
            )
            _shown(StepOutput(division.plain, logits, tokens), taps)
        firsts = step.logits[::each] if each > 1 else step.logits
        self.unsampled.append(_Unsampled(division.deferred, self._copy(firsts, division), taps))
        for row in division.deferred:
            row.has_next = False
        return step

    def _copy(self, logits: Tensor, division: _Division) -> Tensor:
        """Copy logits that are sampled from later, to where a graph reads them if all of the loop's have room there."""
        room = self._graphs.room(self, sum(len(part.rows) for part in self.unsampled), logits, len(division.deferred))
        if division.places is None:
            return logits.clone() if room is None else room.copy_(logits)
        deferred = division.places[0]
        return logits.index_select(0, deferred) if room is None else torch.index_select(logits, 0, deferred, out=room)

    def _division(self, rows: Sequence[Row]) -> _Division:
        if self._last.all_rows is not rows:
            kinds = [row.slot in self.deferring for row in rows]
            deferred, plain = ([row for row, kind in zip(rows, kinds, strict=True) if kind == own] for own in (1, 0))
            places = None
            if deferred and plain:
                places = self._state.staging.to_device([np.flatnonzero(kinds), np.flatnonzero(~np.array(kinds))])
            self._last = _Division(rows, deferred, plain, places)
        return self._last

    # ---- sample

    def run(self, masks: Masks | None = None, processed: Mapping[Row, Tensor] = _NOTHING) -> StepOutput:
        """Sample for all rows, and wait for nothing; return them, the model's logits, and tokens ``[D]``.

        ``NOT_A_TOKEN`` is for rows that have ended meanwhile, too.

        Args:
            masks: new masks of rows that came in with one; the others keep theirs.
            processed: ``[V]`` logits to sample from in place of the model's, on its device, of any dtype.

        Raises:
            ValueError: a row that is given a mask has come in without one; nothing has changed.
        """
        rows, state = self.rows, self._state
        new = None if masks is None else state.slots.masks_of(*masks)
        state.arena.flush()
        launch = None
        if not processed:
            masked = masks is not None and new is not None and masks.rows == rows and len(new[0]) == len(rows)
            launch = self._steps.ready(StepKey.sampling(self._steps.decode_of(len(rows)).rows, masked))
        kept = self._graphs.kept(self, len(rows))
        for part in self.unsampled:
            for tap in part.taps:
                tap.sampling(part.rows)
        if launch is not None and launch.replays and kept is not None:
            step = self._replayed(launch, rows, new)
        else:
            step = self._launched(launch, rows, kept, new, processed)
        parts, self.unsampled = self.unsampled, []  # only now: if that fails, it can be tried again
        for row in rows:
            row.has_next = row.slot is not None
        self._observe(parts, step)
        self._graphs.give_room_back(self)
        return step

    def _replayed(self, launch: Launch, rows: Sequence[Row], masks: _NewMasks | None) -> StepOutput:
        """Sample by a CUDA graph, which may write the masks, too."""
        self._graphs.place(launch.key.rows, rows)
        if masks is not None and launch.key.masked:
            self._graphs.mask(masks[1])
        elif masks is not None:
            self._write_masks(*masks)
        logits, tokens, _ = self._graphs.sample(launch)
        return StepOutput(rows, logits[: len(rows)], tokens[: len(rows)])

    def _launched(
        self,
        launch: Launch | None,
        rows: Sequence[Row],
        kept: Tensor | None,
        masks: _NewMasks | None,
        processed: Mapping[Row, Tensor],
    ) -> StepOutput:
        """Sample without a graph, from the logits that were ``kept`` for one, if all were."""
        slots = self._state.slots
        if masks is not None:
            self._write_masks(*masks)
        # Rows that are sampled late feed in one token a step.
        at = np.array([row.position_at_least for row in rows], dtype=np.int64)
        there, positions = self._state.staging.to_device([slots.of(rows, len(rows)), at])
        copies = [part.logits for part in self.unsampled]
        logits = kept if kept is not None else copies[0] if len(copies) == 1 else torch.cat(copies)
        sampled_from = _replaced(logits, rows, processed)

        def program() -> StepOutputs:
            return StepOutputs(logits, sample(sampled_from, there, positions, slots.tables, deferred=True), {})

        tokens = (program() if launch is None else launch.over(program)()).tokens
        return StepOutput(rows, logits, tokens, sampled_from if processed else None)

    def _write_masks(self, slots: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
        at, bits = self._state.staging.to_device([slots, masks.reshape(-1)])
        self._state.slots.tables.allowed.index_copy_(0, at, bits.view(masks.shape))

    @staticmethod
    def _observe(parts: Sequence[_Unsampled], step: StepOutput) -> None:
        start = 0
        for rows, logits, taps in parts:
            own = slice(start, start + len(rows))
            processed = None if step.processed is None else step.processed[own]
            _shown(StepOutput(rows, logits, step.tokens[own], processed), taps)
            start += len(rows)


def _shown(step: StepOutput, taps: Sequence[Tap]) -> StepOutput:
    for tap in taps:
        tap.sampled(step)
    return step


def _replaced(logits: Tensor, rows: Sequence[Row], processed: Mapping[Row, Tensor]) -> Tensor:
    if not processed:
        return logits
    logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
    for row, own in processed.items():
        logits[rows.index(row)] = own
    return logits


def prepare_deferred(state: RunnerState, graphs: SamplingGraphs, buckets: Sequence[int] = ()) -> None:
    """Launch the kernels of deferred sampling for rows of padding, and capture those of ``buckets`` rows."""
    tables, padding, dtype = state.slots.tables, state.slots.of([], 2), state.dtype
    slots, positions = state.staging.to_device([padding, np.zeros_like(padding)])
    tables.allowed.index_copy_(0, slots[:1], tables.allowed[slots[:1]])
    logits = torch.zeros((2, tables.counts.shape[1]), dtype=dtype, device=state.device)
    sample(logits.clone().index_select(0, torch.zeros_like(slots)), slots, positions, tables, deferred=True)
    if buckets:
        state.staging.lend(max(buckets), tables.allowed.shape[1])
        state.staging.make_room(max(buckets) * 4 * padding.itemsize)
        graphs.prepare(buckets)
