"""Deferred sampling as CUDA graphs: one launch in place of a dozen, once they are prepared."""

# Shapes: D rows, B rows of a bucket, V vocabulary.

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.graphs.capture import GraphCapture
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.sampling.sampling import SamplingTables, sample
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.kvcache.memory import free
from compiled_llm.kvcache.row import Row

logger = logging.getLogger("compiled_llm.graphs")

_OWNER = "choices"


class _Held(NamedTuple):
    """The contents of the columns that a bucket's graph reads: slots and positions of rows, padded."""

    bucket: int
    slots: list[int]
    positions: list[int]


class SamplingGraphs:
    """Captured sampling, and the logits, slots and positions that it reads, at fixed addresses."""

    # One loop at a time keeps its logits there, from the first launch whose sampling is deferred until it is sampled.

    def __init__(self, state: RunnerState, captures: bool) -> None:
        """Allocate and capture nothing yet; other steps of the table may evict these."""
        self._state, self._table, self._device = state, state.step_table, state.device
        self._captures = captures
        self._capturer: GraphCapture | None = None
        self._tables: SamplingTables | None = None
        self._logits = torch.empty(0, 0, device=self._device)
        self._columns = torch.empty(0, dtype=torch.int64, device=self._device)
        self._masks = torch.empty(0, 0, dtype=torch.int32, device=self._device)
        self._user: weakref.ref[object] | None = None
        self._kept = 0  # rows of the user's
        self._held = _Held(0, [], [])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the graphs read."""
        return self._logits.nbytes + self._columns.nbytes + self._masks.nbytes

    @property
    def buckets(self) -> list[int]:
        """The numbers of rows that have graphs, ascending."""
        return sorted(key.rows for key in self._table.of("sampling") if not key.masked)

    def release(self) -> None:
        """Give everything back."""
        self._forget()
        for tensor in (self._logits, self._columns, self._masks):
            free(tensor)

    # ---- capture

    def prepare(self, buckets: Sequence[int]) -> None:
        """Capture sampling of ``buckets`` rows, too; logits that a loop keeps here now are sampled without a graph."""
        tables, dtype = self._state.slots.tables, self._state.dtype
        known = set(self.buckets) if tables is self._tables else set()
        if not self._captures or known.issuperset(buckets):
            return
        self._forget()
        buckets, self._capturer = sorted(known.union(buckets), reverse=True), GraphCapture(self._device)
        self._tables, most = tables, buckets[0]
        with torch.inference_mode(False):
            self._logits = torch.zeros(most, tables.counts.shape[1], dtype=dtype, device=self._device)
            self._columns = torch.zeros(2 * most, dtype=torch.int64, device=self._device)
            self._masks = torch.zeros(most, tables.allowed.shape[1], dtype=torch.int32, device=self._device)
        for bucket in buckets:
            self._columns[: 2 * bucket].view(2, bucket)[0] = self._state.slots.padding
            self._masked_launch(bucket)
            for masked in (False, True):
                self._capture(bucket, masked)

    def _capture(self, bucket: int, masked: bool) -> None:
        """Capture sampling, unless a step would have to make room for it: it can be launched as well."""
        if self._table.full:
            logger.info("a choice for %d rows is not captured: the CUDA graphs may not take more", bucket)
            return
        assert self._capturer is not None
        launch = self._masked_launch if masked else self._launch
        key = StepKey.sampling(bucket, masked)
        with self._table.capturing(key):
            captured = self._capturer.capture(functools.partial(launch, bucket))
            self._table.add(key, captured, captured.cost, _OWNER)

    def _forget(self) -> None:
        self._table.forget("sampling")
        self._table.shared[_OWNER] = 0
        self._tables = self._capturer = self._user = None
        self._kept = 0
        self._held = _Held(0, [], [])

    def _masked_launch(self, bucket: int) -> StepOutputs:
        assert self._tables is not None
        self._tables.allowed.index_copy_(0, self._columns[:bucket], self._masks[:bucket])
        return self._launch(bucket)

    def _launch(self, bucket: int) -> StepOutputs:
        assert self._tables is not None
        slots, positions = self._columns[: 2 * bucket].split(bucket)
        logits = self._logits[:bucket]
        tokens = sample(logits, slots, positions, self._tables, deferred=True)
        positions += 1  # those of the next tokens, as long as the same rows go on
        return StepOutputs(logits, tokens, {})

    # ---- keep logits, and sample from them

    def room(self, user: object, start: int, logits: Tensor, rows: int) -> Tensor | None:
        """Return ``[rows, V]`` for logits, after ``start`` rows of the same user's; None if they have no place here."""
        # The loop ``user`` keeps them here until ``give_room_back``.
        here, end = None if self._user is None else self._user(), start + rows
        follows = start == (self._kept if here is user else 0) and here in (None, user)
        if not (follows and self._reads_settings) or end > len(self._logits) or logits.dtype != self._logits.dtype:
            return None
        self._user, self._kept = weakref.ref(user), end
        return self._logits[start:end]

    @property
    def _reads_settings(self) -> bool:
        """Whether the sampling settings still lie where the graphs read them."""
        return self._state.slots.tables is self._tables

    def give_room_back(self, user: object) -> None:
        """Let others keep their logits here."""
        if self._user is not None and self._user() is user:
            self._user, self._kept = None, 0

    def kept(self, user: object, rows: int) -> Tensor | None:
        """Return the logits ``[rows, V]`` of a user who keeps those of all its rows here, else None."""
        is_user = self._user is not None and self._user() is user
        return self._logits[:rows] if is_user and self._kept == rows and self._reads_settings else None

    def place(self, bucket: int, rows: Sequence[Row]) -> None:
        """Write slots and positions of rows, and padding, to where a bucket's graph reads them."""
        # Mostly they are there already: each replay has moved the positions on.
        slots, padding = self._state.slots.numbers(rows), self._state.slots.padding
        wanted, columns = _Held(bucket, slots, [row.position_at_least for row in rows]), self._columns[: 2 * bucket]
        if self._held != wanted:
            numbers = np.zeros((2, bucket), dtype=np.int64)
            numbers[0], numbers[0, : len(rows)], numbers[1, : len(rows)] = padding, slots, wanted.positions
            self._held = _Held(0, [], [])
            self._state.staging.upload([(numbers.reshape(-1), columns)])
            self._held = wanted

    def mask(self, masks: NDArray[np.int32]) -> None:
        """Write masks ``[n, words]`` of the rows that have places to where the graphs read them."""
        self._state.staging.upload_lent(masks, self._masks)

    def sample(self, replay: Callable[[], StepOutputs]) -> StepOutputs:
        """Replay the graph for which rows are placed; the next replay overwrites what it returns."""
        held, self._held = self._held, _Held(0, [], [])
        outputs = replay()
        self._held = held._replace(positions=[position + 1 for position in held.positions])
        return outputs
