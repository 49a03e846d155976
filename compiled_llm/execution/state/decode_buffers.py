"""The buffers that a replayed decode step reads and advances, at fixed addresses, and its batch sizes."""

# Shapes: B rows of a bucket, q new tokens of each.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.inputs import DecodeInputs, StepTap
from compiled_llm.execution.state.arena import Arena
from compiled_llm.execution.state.slots import Slots
from compiled_llm.kvcache.memory import mark_static
from compiled_llm_ops.protocol import DecodeOps


class DecodeBuffers:
    """The decode buffers for the largest batch, and their views for each bucket."""

    @staticmethod
    def columns(max_rows: int) -> dict[str, tuple[int, torch.dtype]]:
        """Return the columns of an arena for this many rows."""
        long, short = torch.int64, torch.int32
        types = {"decode_slot": long, "decode_position": long, "decode_length": short, "decode_start": short}
        return {name: (max_rows, dtype) for name, dtype in types.items()}

    def __init__(self, arena: Arena, slots: Slots, ops: DecodeOps | None, taps: tuple[StepTap, ...] = ()) -> None:
        """``ops`` are those by which decode steps attend; None if they are planned. ``taps`` watch the steps."""
        self.ops = ops  # those by which decode steps attend; None if they are planned
        self._max_rows = len(arena["decode_slot"])
        columns = (arena["decode_slot"], arena["decode_position"], arena["decode_length"], arena["decode_start"])
        self._whole = DecodeInputs(*columns, slots.pages, ops, states=slots.states, taps=taps)
        self._views: dict[StepKey, DecodeInputs] = {}
        self._fed: dict[int, Tensor] = {}  # known tokens, by q

    def of(self, step: StepKey) -> DecodeInputs:
        """Return the views for a bucket, always the same tensors; batch 1 is compiled with its size built in."""
        if step not in self._views:
            whole, rows = self._whole, step.rows
            batch_indices = (whole.slots[:rows], whole.positions[:rows], whole.lengths[:rows], whole.starts[:rows])
            mark_columns(batch_indices, rows)
            self._views[step] = DecodeInputs(
                *batch_indices,
                whole.indices,
                whole.ops,
                fed=self._fed_of(step),
                taps=whole.taps,
                states=whole.states,
                wants=step.wants,
            )
        return self._views[step]

    def _fed_of(self, step: StepKey) -> Tensor | None:
        """Return the place of a step's known tokens, ``[B, q]``; None if each row has one token, that in its slot."""
        new = step.new_tokens_per_row
        if new == 1:
            return None
        if new not in self._fed:
            with torch.inference_mode(False):
                self._fed[new] = torch.zeros(self._max_rows, new, dtype=torch.int64, device=self._whole.slots.device)
        fed = self._fed[new][: step.rows]
        mark_columns([fed], step.rows)
        return fed

    @property
    def nbytes(self) -> int:
        """Bytes outside the arena."""
        return sum(fed.nbytes for fed in self._fed.values())


def mark_columns(columns: Sequence[Tensor], rows: int) -> None:
    """Have columns of a bucket read in place, with lengths that are symbolic sizes for more than one row."""
    for column in columns:
        mark_static(column)
        if rows > 1:
            torch._dynamo.mark_dynamic(column, 0)


def buckets_up_to(max_rows: int) -> list[int]:
    """Return the batch sizes that decode is captured for: 1, 2, 4, 8, every 8 to 64, every 16, ``max_rows`` itself."""
    sizes = [size for size in (1, 2, 4, *range(8, 64, 8), *range(64, max_rows, 16)) if size < max_rows]
    return [*sizes, max_rows]


def bucket_for(rows: int, max_rows: int) -> int:
    return next(size for size in buckets_up_to(max_rows) if size >= rows)
