"""The tokens of running rows on the device, by slot, in which drafters look."""

# Shapes: X slots, L tokens of the longest text.

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.config import WrapConfig
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.runner_state import RunnerState
from compiled_llm.execution.state.slots import SLOTS_FOR_A_ROW
from compiled_llm.kvcache.memory import free_bytes, mark_for_any_room, room_of
from compiled_llm.kvcache.row import Row
from compiled_llm_ops import build_sampling

UNKNOWN = -1
"""Stands for a token of which only the embedding is known."""

_ALIGNED = 16
"""Texts begin at multiples of it, of which kernels read several tokens at once."""


class Texts:
    """The texts of one model's rows at a fixed address.

    Attributes:
        tokens: ``[X, L]`` int32.
        longest_text: how many tokens a row may have, at most L.
        limits: ``[X]`` int32, how many drafts of each slot's row may count.
        longest: ``[X]`` int32, how many of its last tokens are looked up at most, and at least ``shortest``.
    """

    # A step that drafts writes what it feeds in. Others write nothing: what is missing is uploaded before the next one
    # that drafts. Which slots hold which text is known by the rows' numbers, since rows come and go between.

    def __init__(self, state: RunnerState) -> None:
        """Allocate; ValueError says how many bytes are missing."""
        self._staging, slots = state.staging, state.slots
        self._deferring = slots.deferring
        self.longest_text = min(state.max_positions, state.pool.tokens_in(state.pool.total))
        shape, device = _shape(slots.padding + 1, self.longest_text), state.device
        _check_room(shape, device, free_bytes(device))
        try:
            with torch.inference_mode(False):
                self.tokens = mark_for_any_room(torch.full(shape, UNKNOWN, dtype=torch.int32, device=device))
                # L follows from how many pages there are, which is not built into the code either.
                torch._dynamo.mark_dynamic(self.tokens, 1)
                columns = (torch.zeros(shape[0], dtype=torch.int32, device=device) for _ in range(3))
                self.limits, self.longest, self.shortest = map(mark_for_any_room, columns)
        except torch.OutOfMemoryError as error:
            raise ValueError(_too_large(shape, device, free_bytes(device))) from error
        self._numbers = np.zeros((3, shape[0]), dtype=np.int32)  # what the three columns have
        # of each slot, the row's number, and how many tokens were uploaded
        self._there: dict[int, tuple[int, int]] = {}

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + 3 * self.limits.nbytes

    def enter(
        self,
        rows: Sequence[Row],
        text_of: Callable[[Row], NDArray[np.int64]],
        numbers: Sequence[tuple[int, int, int]],
    ) -> None:
        """Upload what is missing of the texts of rows that have slots, as far as the host knows them."""
        # ``numbers`` are each row's for the three columns; one whose tokens are sampled late has no drafts.
        pairs: list[tuple[NDArray[Any], Tensor]] = []
        columns = self._numbers.copy()
        for row, own in zip(rows, numbers, strict=True):
            slot, text = cast(int, row.slot), text_of(row)
            owner, there = self._there.get(slot, (0, 0))
            first = min(there, len(text)) if owner == row.number else 0
            if first < len(text):
                pairs.append((text[first:].astype(np.int32), self.tokens[slot, first : len(text)]))
            self._there[slot] = row.number, len(text)
            columns[:, slot] = own
            columns[0, slot] *= slot not in self._deferring
        if not np.array_equal(columns, self._numbers):
            self._numbers = columns
            pairs += zip(columns, (self.limits, self.longest, self.shortest), strict=True)
        if pairs:
            self._staging.upload(pairs)

    def forget(self, rows: Sequence[Row]) -> None:
        """Upload the whole texts of rows again: they do not go on from what is there."""
        numbers = {row.number for row in rows}
        self._there = {slot: entry for slot, entry in self._there.items() if entry[0] not in numbers}


def texts_of(model_runner: ModelRunner) -> Texts:
    """Return the texts of a model's rows, allocated when they are first asked for; ValueError as ``Texts``."""
    with _allocation:
        texts = model_runner.parts.get("drafts")
        if texts is None:
            texts = model_runner.parts["drafts"] = Texts(model_runner.state)
            dtype = model_runner.state.facts.model.dtype
            build_sampling(model_runner.vocabulary, dtype, model_runner.device, before=True)
    return cast(Texts, texts)


_allocation = threading.Lock()
"""Two loops that begin at once in two threads must get the same buffers: one's drafter reads what both write."""


def check_memory(config: WrapConfig, rows: int, max_positions: int, device: torch.device) -> None:
    """Raise ValueError if the texts of so many rows will find too little memory beside pages that are not there yet."""
    longest, left = room_of(config, device, max_positions)
    _check_room(_shape(SLOTS_FOR_A_ROW * rows + 1, longest), device, left)


def _shape(slots: int, longest: int) -> tuple[int, int]:
    """Return X and L for texts of up to ``longest`` tokens."""
    return slots, -(-longest // _ALIGNED) * _ALIGNED


def _check_room(shape: tuple[int, int], device: torch.device, left: int) -> None:
    if _nbytes(shape) > left:
        raise ValueError(_too_large(shape, device, left))


def _too_large(shape: tuple[int, int], device: torch.device, left: int) -> str:
    return (
        f"the texts that drafts are looked up in, of {shape[0]} slots and up to {shape[1]} tokens, take "
        f"{_nbytes(shape)} bytes, and {max(0, left)} are left on {device}; wrap with a smaller kv_memory or "
        "max_batch_size, or leave drafts out"
    )


def _nbytes(shape: tuple[int, int]) -> int:
    return 4 * shape[0] * (shape[1] + 3)
