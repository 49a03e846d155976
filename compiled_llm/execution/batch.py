"""The input of one step, as data, and its result."""

# Shapes: Q new tokens of a row, N rows that a token is sampled for, V vocabulary.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.inputs import Pooling
from compiled_llm.compilation.program import Program
from compiled_llm.execution.accepted import AcceptedTokens
from compiled_llm.execution.state.staging import Staging
from compiled_llm.kinds.rows import NO_ENTRY
from compiled_llm.kvcache.pool import Promise
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.table import Stored


class ExtraInputs(Protocol):
    """Inputs of a row's new tokens besides their ids, which a program of its own reads."""

    @property
    def program(self) -> Program:
        """It runs launches with such rows, beside which others may have no extra inputs."""
        ...

    @property
    def captured(self) -> bool:
        """Whether CUDA graphs are captured of such launches."""
        ...

    def slice(self, start: int, stop: int) -> ExtraInputs:
        """Return those of new tokens ``start`` to ``stop``."""
        ...

    def empty(self) -> ExtraInputs:
        """Return those of no tokens, which keep no memory of these."""
        ...

    def pack(self, chunk: Sequence[Extension], staging: Staging) -> Any:
        """Return ``PrefillInputs.extra`` of a launch of packed rows, some of which have such inputs."""
        ...


class Extension(NamedTuple):
    """New tokens of one row: a prompt, or a chunk of one."""

    row: Stored  # not yet grown by them in a ``Batch``; grown while they are packed
    ids: NDArray[np.int64]  # ``[Q]`` int64; a negative one is the next token of the slot ``-1 - id``
    positions: NDArray[np.int64]  # ``[Q]`` int64, rotary positions
    is_last: bool = True  # whether a token is sampled after them; not after a chunk that others follow
    place: int = -1  # while they are packed, the row's in ``Slots.places``, if taps ask; -1 is padding's
    # while they are packed, the entries that hold the row's state before them and after
    states: tuple[int, int] = NO_ENTRY, NO_ENTRY
    extra: ExtraInputs | None = None

    @classmethod
    def of(cls, row: Row, ids: NDArray[np.int64], is_last: bool = True) -> Extension:
        """Return an extension at the positions that follow the row's last."""
        return cls(row, ids, row.exact_position + np.arange(len(ids)), is_last)

    @property
    def is_next(self) -> bool:
        """Whether it is what ``of_next`` returns."""
        return len(self.ids) == 1 and self.ids[0] < 0

    @classmethod
    def of_next(cls, row: Row) -> Extension:
        """Return the next token of a row that has a slot, which stands for it: the host may not know it yet."""
        assert row.slot is not None, "it has one"
        return cls.of(row, np.array([-1 - row.slot], dtype=np.int64))


def rows_of(extensions: Sequence[Extension]) -> list[Row]:
    """Return the rows of a batch's extensions."""
    return [cast(Row, extension.row) for extension in extensions]


class TokenSpan(NamedTuple):
    """New tokens of a row that a launch computes next to each other: ``size`` of them, from the row's ``first``."""

    # ``first`` is an upper bound while drafts of the row are unread; one that has drafts gives nothing besides tokens.

    row: Row
    first: int
    size: int


def last_tokens(rows: Sequence[Row], size: int = 1) -> list[TokenSpan]:
    """Return the last tokens of rows, already grown by them."""
    return [TokenSpan(row, row.length_at_most - size, size) for row in rows]


class Tap:
    """A watcher of steps, called in the model's executor; nothing that it overrides may wait for the device."""

    wants: tuple[str, ...] = ()  # outputs of the model that steps give it besides logits, by HuggingFace's names

    def launched(self, spans: Sequence[TokenSpan], outputs: StepOutputs, later: int = 0) -> None:
        """Copy what a launch gives besides logits: ``[T, ...]`` each, until the next launch."""
        # ``spans`` say whose tokens these are, in order; padding may follow. The same object stands for the same rows.
        # ``later`` tokens of its row come between each span and the tokens.

    def sampling(self, rows: Sequence[Row]) -> None:
        """Look at rows just before their tokens are sampled: the next call of ``sampled`` with these rows has them."""
        # Sampling notes each token, by which a state may forget others. What was noted before is to be had here alone.

    def sampled(self, step: StepOutput) -> None:
        """Look at a launch's own step, while its logits are what they are."""
        # Of rows whose sampling is deferred once their tokens are sampled; of the others of the launch before.


class Drafting(Protocol):
    """What has the rows of a decode step feed in drafts; of these rows no tap is told anything besides tokens."""

    drafter: str  # who proposes drafts
    new_tokens: int  # that each row feeds in

    def entering(self, rows: Sequence[Row]) -> None:
        """Hear of rows with slots before a decode step of them that is made anew; one that is repeated says nothing."""

    def read(self, accepted: AcceptedTokens) -> list[list[int]]:
        """Return the tokens of each row of a step that count, at least one, waiting for them."""
        ...


def outputs_of(taps: Sequence[Tap]) -> tuple[str, ...]:
    """Return what launches that these watch give besides logits."""
    return tuple(sorted({want for tap in taps for want in tap.wants})) if taps else ()


class Batch(NamedTuple):
    """The rows of one step, no row twice. Either part may be empty; if neither is, it is two launches, or mixed."""

    decode: Sequence[Row] = ()  # rows that feed in one token each, or guesses after it
    extend: Sequence[Extension] = ()  # new tokens of other rows
    # ``[len(decode)]`` integers on the device, the tokens that the rows of ``decode`` feed in; None for those that were
    # sampled for them
    tokens: Tensor | None = None
    promise: Promise | None = None  # pages that the rows may take together, besides those promised to each
    # run both parts in one launch, ``decode`` as rows of the prefill; ``ModelRunner.can_mix`` says whether
    mixed: bool = False
    taps: Sequence[Tap] = ()  # who watches its launches
    drafting: Drafting | None = None  # of the launch of ``decode`` alone
    pooling: Pooling = ""  # of the launch of ``extend``, which gives this in place of logits

    @property
    def wants(self) -> tuple[str, ...]:
        """The outputs that the launch of ``decode`` gives besides logits."""
        return outputs_of(self.taps) if self.drafting is None else ()


class StepOutput(NamedTuple):
    """The result of a batch, on the device; the next decode step overwrites that of the last one."""

    rows: Sequence[Row]  # the rows that a token was sampled for: those of ``decode``, then those of ``extend`` that end
    logits: Tensor | None  # ``[N, V]`` in the model's dtype; None if the step was two launches, whose logits lie apart
    tokens: Tensor  # ``[N]`` int64, the next tokens; q of each row of ``accepted``, and as many logits
    # ``[N, V]``, the logits that they were sampled from, if the host has replaced some; else None
    processed: Tensor | None = None
    accepted: AcceptedTokens | None = None  # of ``decode``, if the device decides how many of its tokens count
