"""What a feature has to offer by which decode steps read the pages that rows share once for all of these rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.kinds.rows import JointAttention
from compiled_llm.kvcache.row import Row

Runs: TypeAlias = Sequence[Any]
"""Pages that rows share and read together, which the feature alone understands; the same object while they are."""


class SharedPages(Protocol):
    """The rows of one loop that share pages."""

    def runs(self, rows: Sequence[Row]) -> Runs:
        """Return what rows, not yet grown, read together in their next step; nothing if that does not pay."""
        ...


class SharingTables(Protocol):
    """What such steps read besides the page table, at fixed addresses."""

    @property
    def nbytes(self) -> int: ...

    def of(self, step: StepKey) -> JointAttention:
        """Return the way rows of a bucket attend, always by the same tensors."""
        ...

    def lay_out(self, runs: Runs, rows: Sequence[Row], step: StepKey) -> None:
        """Write which pages of ``rows``, which have slots, are read together."""
        ...


class Sharing(Protocol):
    """Whether and how the steps of one model read shared pages once.

    Attributes:
        always: whether all do whose rows share some, so that each such step is worth preparing.
    """

    always: bool

    def of_loop(self) -> SharedPages: ...

    def tables(self, state: Any) -> SharingTables:
        """Allocate them for the largest batch of a ``RunnerState``."""
        ...
