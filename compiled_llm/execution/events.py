"""What happened on the device side of a model, and why, for ``explain``."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

logger = logging.getLogger("compiled_llm.graphs")

Upload = Literal[
    "a row entered a new page",
    "a call moved its rows in",
    "rows joined, left or went back",
    "a row stopped sharing a page",
    "a bucket was prepared",
]
"""Why rows and their pages were written into the decode buffers."""

_NEVER = "warmup does not prepare it"
_LOST = (
    "the model was moved, converted or hooked after warmup, or fused weights were replaced by ones that cannot be, "
    "which takes all that was prepared"
)


@dataclass(frozen=True)
class Miss:
    """Something that was compiled or recorded while a call waited for it.

    Attributes:
        what: which program and bucket.
        rows: how many rows the call had.
        seconds: how long it waited.
        cause: why it was not ready.
        warmed: whether ``warmup`` had been called before and could have prepared it.
    """

    what: str
    rows: int
    seconds: float
    cause: str
    warmed: bool

    @property
    def call(self) -> str:
        """The call that waited, in words."""
        return f"a call of {self.rows} row{'s' * (self.rows > 1)} waited {self.seconds:.1f} s"


@dataclass
class Journal:
    """What is kept of a wrapped model's life, over moves and conversions.

    Attributes:
        uploads: page tables written into the decode buffers, by cause.
        misses: what calls had to wait for.
    """

    uploads: Counter[Upload] = field(default_factory=Counter)
    misses: list[Miss] = field(default_factory=list)
    _warmed: bool = False
    _lost: bool = False

    def warmed_up(self) -> None:
        """Note that ``warmup`` has run."""
        self._warmed, self._lost = True, False

    def started_anew(self) -> None:
        """Note that everything compiled and recorded is gone."""
        self._lost = self._warmed

    def missed(self, what: str, rows: int, seconds: float, cause: str | None) -> None:
        """Note that a call of ``rows`` rows waited.

        Args:
            what: which program and bucket.
            rows: how many rows the call had.
            seconds: how long it waited.
            cause: why, if ``warmup`` was called and still counts; None for what it never prepares.
        """
        warmed = self._warmed and cause is not None
        if cause is None:
            cause = _NEVER
        elif not self._warmed:
            cause = "warmup was not called"
        elif self._lost:
            cause = _LOST
        miss = Miss(what, rows, seconds, cause, warmed)
        self.misses.append(miss)
        logger.debug("%s for %s: %s", miss.call, what, cause)
