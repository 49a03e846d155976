"""What watches all steps of a model, beside its pages; without one a step asks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.inputs import StepTap
from compiled_llm.config import WrapConfig
from compiled_llm.execution.state.arena import Arena
from compiled_llm.execution.state.staging import Staging
from compiled_llm.kvcache.pool import RowWatch
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm.kvcache.row import Row


class RunnerTap:
    """A watcher of all steps, in the model's executor."""

    inputs: StepTap  # what programs are given of it
    carried: Sequence[Tensor] = ()  # tensors of which a row takes its own entry along when it changes its slot
    nbytes: int = 0  # outside the arena

    def __init__(
        self, config: WrapConfig, pages: int, arena: Arena, staging: Staging, memory: ReleasableMemory
    ) -> None:
        """Allocate what it has for so many pages, in the memory of these."""

    @staticmethod
    def columns(places: int) -> dict[str, tuple[int, torch.dtype]]:
        """Return the columns of an arena for so many ``Slots.places``."""
        return {}

    @staticmethod
    def row() -> RowWatch:
        """Return what hears of a new row."""
        return RowWatch()

    def placed(self, rows: Sequence[Row], places: Sequence[int], new: Sequence[int]) -> None:
        """Write what a launch reads of rows, already grown by their ``new`` tokens, at their places."""

    def stored(self, rows: Sequence[Row], ids: Sequence[NDArray[np.int64]] | None = None) -> None:
        """Note that a launch stores the rows' last tokens: these, or some that only the device knows."""

    def inspect(self) -> None:
        """Look at what has run, and wait for nothing."""

    def report(self) -> None:
        """Raise what all steps have found, waiting for them."""

    def faults(self) -> int:
        """Return how much they have found, waiting for them."""
        return 0

    def copied(self, source: Tensor, target: Tensor) -> None:
        """Copy what belongs to pages with them."""

    def imported(self, rows: Sequence[Row], places: Sequence[int], ids: Sequence[NDArray[np.int64]]) -> None:
        """Note what was written to the ends of rows: tokens ``[T]`` of each, zeros if nobody knows them."""


class RunnerTapPart(Protocol):
    """A part that watches all steps of a model."""

    TAP: type[RunnerTap]
