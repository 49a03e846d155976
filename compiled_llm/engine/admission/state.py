"""What a policy of admission knows, and what it says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


class Requests(NamedTuple):
    """Requests that run, or that wait, as arrays ``[N]``."""

    numbers: Counts  # as they came; requests that begin again keep theirs
    tokens: Counts  # that its row has once all that is known of its text is computed
    answered: Counts  # tokens of its answer among them
    left: Counts  # tokens that its row grows by from there, at most
    exact: NDArray[np.bool_]  # whether it grows by as many: nothing ends its answer earlier
    shared: Counts  # pages at the beginning of its row that other rows hold, too; of those that wait, an estimate


class AdmissionState(ABC):
    """The state of a scheduler when the next request could begin: there is a slot for it, and others run.

    Attributes:
        step: counts the steps of the engine.
        page_size: tokens in one page.
        pages: that running rows have, apart from shared ones, and those that they and new rows can take; pages that
            only the prefix cache has are among these.
        max_rows: how many requests may run at once, with as many slots and states as there are.
        running: the requests that run.
        next: the one that could begin; the pages that its row shares are known.
        lengths: of answers that ended lately, in tokens, sorted ``[M]``.
    """

    step: int
    page_size: int
    pages: int
    max_rows: int
    running: Requests
    next: Requests
    lengths: Counts

    @property
    @abstractmethod
    def waiting(self) -> Requests:
        """All that wait, the next one first; to list them takes the time of a microsecond for each."""


class Admission(Protocol):
    """A policy of admission, with a memory of its own if it likes."""

    def plan(self, state: AdmissionState) -> bool:
        """Return whether the next request begins; it does only if there are pages for its text."""
        ...


def joined(one: Requests, other: Requests) -> Requests:
    return Requests._make(np.concatenate(pair) for pair in zip(one, other, strict=True))
