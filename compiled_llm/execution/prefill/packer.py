"""Packs rows into the inputs of prefills: on the host, and from there into tensors on the device."""

# Shapes: T packed tokens, L tokens whose logits are wanted, C of them after which a token is sampled.

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.inputs import ExtraTensors, PrefillInputs
from compiled_llm.execution.batch import ExtraInputs
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.prefill.extra_memory import ExtraMemory
from compiled_llm.execution.prefill.packing import (
    Packed,
    PrefillChunk,
    as_bytes,
    null_extension,
    pack,
    padded,
    token_count,
)
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.kinds.rows import AttentionPlans
from compiled_llm.kvcache.table import HostTable


class PaddedChunk(NamedTuple):
    """A chunk, padded to a shape, on the host."""

    shape: StepKey
    packed: Packed
    table: HostTable
    extra: ExtraTensors | None  # in new tensors; None if the shape's program reads ids


class PrefillPacker:
    """The packer of one model's prefills.

    Attributes:
        extra_memory: where CUDA graphs read extra inputs.
    """

    def __init__(self, state: RunnerState, planner: Planner, largest: StepKey | None) -> None:
        """``largest`` is the shape that holds all captured ones; None if nothing is captured."""
        self._state = state
        self._planner = planner
        self._largest = largest
        self._page_size = state.config.page_size
        self._taps = tuple(tap.inputs for tap in state.taps)
        self._padding = state.slots.padding if state.taps else None
        self._stateful = state.pool.states is not None
        self.extra_memory = ExtraMemory()

    # ---- launches of any size

    def least_sizes(self, chunk: PrefillChunk) -> PrefillChunk:
        """Return a chunk with at least two rows, tokens, logits and slots: no symbolic size is less."""
        rows = chunk.rows
        if len(rows) == 1:
            rows = [*rows, null_extension(max(0, 2 - token_count(rows)), self._page_size)]
        return self._filled_up(chunk._replace(rows=rows), max(2, len(chunk.keep)), max(2, len(chunk.slots)))

    def inputs(self, chunk: PrefillChunk, schedule: int) -> PrefillInputs:
        """Copy a launch, of ``least_sizes``, into new tensors on the device, and plan it."""
        packed, table = self._pack(chunk)
        staging = self._state.staging
        columns, indices = staging.to_device(packed), self._state.prefill_indices
        if indices is not None:
            staging.upload([(table.indices, indices)])
        else:
            (indices,) = staging.to_device([table.indices])
            torch._dynamo.mark_dynamic(indices, 0)
        if not self._planner.attends_alone(schedule):
            self._planner.plan_prefill(table)
        extra = None if chunk.extra is None else chunk.extra.pack(chunk.rows, staging)
        return self._as_inputs(columns, indices, schedule, self._planner.for_prefill(), chunk, extra)

    # ---- launches of captured shapes

    def padded(self, chunk: PrefillChunk, shape: StepKey, empty: ExtraInputs | None) -> PaddedChunk:
        """Pad a chunk to a shape, whose program reads ids, or extra inputs like those of no tokens, ``empty``."""
        rows = padded(chunk.rows, shape, self._page_size)
        packed, table = self._pack(self._filled_up(chunk._replace(rows=rows), *shape.outputs))
        return PaddedChunk(shape, packed, table, None if empty is None else empty.pack(rows, self._state.staging))

    def new_inputs(self, chunk: PaddedChunk) -> tuple[PrefillInputs, Tensor]:
        """Return new tensors that a shape's program reads, and the one to ``fill``, from which they are unpacked."""
        shape, staging = chunk.shape, self._state.staging
        (filled,) = staging.to_device([as_bytes(chunk.packed)])
        columns, plans = staging.to_device(chunk.packed), self._planner.for_prefill(shape)
        extra = self._extra_at_fixed_place(chunk)
        return self._as_inputs(columns, self._indices, shape.schedule, plans, shape, extra), filled

    def fill(self, chunk: PaddedChunk, filled: Tensor) -> None:
        """Write a chunk to where the CUDA graph of its shape reads it, and plan it."""
        self._state.staging.upload([(as_bytes(chunk.packed), filled), (chunk.table.indices, self._indices)])
        self._planner.plan_prefill(chunk.table, chunk.shape)
        if chunk.extra is not None:
            self._extra_at_fixed_place(chunk)

    def _extra_at_fixed_place(self, chunk: PaddedChunk) -> ExtraTensors | None:
        if chunk.extra is None or self._largest is None:
            return None
        return self.extra_memory.filled(chunk.extra, chunk.shape.tokens, self._largest.tokens)

    # ---- both

    def _filled_up(self, chunk: PrefillChunk, logits: int, sampled: int) -> PrefillChunk:
        """Return a chunk with so many logits and slots; those that are added are of padding."""
        _, keep, slots, *_ = chunk
        if missing := logits - len(keep):
            keep = np.concatenate([keep, np.zeros(missing, dtype=np.int64)])
        if missing := sampled - len(slots):
            slots = np.concatenate([slots, self._state.slots.of([], missing)])
        return chunk._replace(keep=keep, slots=slots)

    def _pack(self, chunk: PrefillChunk) -> tuple[Packed, HostTable]:
        return pack(chunk, self._page_size, self._padding, self._stateful)

    @property
    def _indices(self) -> Tensor:
        assert self._state.prefill_indices is not None, "no prefill of layers with indexers is captured"
        return self._state.prefill_indices

    def _as_inputs(
        self,
        columns: Sequence[Tensor],
        indices: Tensor,
        schedule: int,
        plans: AttentionPlans,
        wanted: PrefillChunk | StepKey,
        extra: ExtraTensors | None,
    ) -> PrefillInputs:
        """Return device tensors, in the order of ``Packed``, as inputs of the program."""
        named = Packed(*columns)._asdict()  # type: ignore[arg-type]
        named |= {"ids": named["ids"][None], "positions": named["positions"][None]}
        if not self._taps:
            named["places"] = None
        if not self._stateful:
            named |= {"read": None, "write": None}
        return PrefillInputs(
            indices=indices,
            plans=plans,
            taps=self._taps,
            alone=self._planner.attends_alone(schedule),
            wants=wanted.wants,
            pooling=wanted.pooling,
            extra=extra,
            **named,
        )


def unpack(inputs: PrefillInputs, filled: Tensor) -> None:
    """Fill the inputs of a prefill that was uploaded in one tensor: copies inside a graph take the host no time."""
    start = 0
    for name in Packed._fields:
        if (own := getattr(inputs, name)) is None:
            continue
        column = own.view(-1).view(torch.uint8)
        column.copy_(filled[start : start + len(column)])
        start += len(column)
