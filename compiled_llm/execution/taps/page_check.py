"""The check that rows read their own pages, once in each step: the rows' chains, and what becomes of a fault."""

# A row's chain is on the host for as long as the host knows its tokens, and on the device, in the row's slot, from the
# first decode step on. Where neither has it, since the row was forked, rewound or kept, that of its last tag counts
# once.
# Shapes: B rows, T packed tokens, q new tokens of each row in decode, X places.

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.inputs import DecodeInputs, PrefillInputs
from compiled_llm.config import WrapConfig
from compiled_llm.execution.state.arena import Arena
from compiled_llm.execution.state.runner_tap import RunnerTap
from compiled_llm.execution.state.staging import Readback, Readbacks, Staging
from compiled_llm.kvcache.errors import WrongPageError
from compiled_llm.kvcache.memory import mark_static
from compiled_llm.kvcache.pool import RowWatch
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.table import build_table
from compiled_llm_ops import check_pages
from compiled_llm_ops.attention.check_pages import PageFault, chain_after, chain_before, fault_of
from compiled_llm_ops.contracts.page_checks import CHAIN_ADOPTED, CHAIN_KNOWN, CHAIN_ORIGIN, FAULT_ROW_BITS, NO_FAULT

if TYPE_CHECKING:
    from compiled_llm.execution.state.runner_tap import RunnerTapPart
    from compiled_llm.execution.taps import page_check as this

    checked: RunnerTapPart = this

logger = logging.getLogger("compiled_llm.pages")

_LAUNCHES_BETWEEN_LOOKS = 16
"""With ``check_pages="log"``; a fault stays where it is noted."""


class PageTags(NamedTuple):
    """The tensors by which a step checks that rows read their own pages, the arguments of ``check_pages``."""

    tags: Tensor  # ``[P, S, 2]`` int32
    chains: Tensor  # ``[X]`` int64, that of the row in each of X places
    row_numbers: Tensor  # ``[X]`` int32
    faults: Tensor  # ``[2]`` int64

    def prefilled(self, inputs: PrefillInputs, ids: Tensor) -> None:
        """Check the rows of a prefill; see ``StepTap``."""
        assert inputs.places is not None, "there is a tap"
        lengths = self._lengths(inputs.indptr, inputs.last_page_len)
        self._check(ids, inputs.indptr[:-1], lengths, inputs.indices, inputs.places, inputs.qo_indptr)

    def decoded(self, inputs: DecodeInputs, ids: Tensor) -> None:
        """Check the rows of a decode step; see ``StepTap``."""
        planned, starts, lengths, indices = inputs.planned, inputs.starts, inputs.lengths, inputs.indices
        if planned is not None:
            starts, indices = planned.indptr[:-1], planned.indices
            lengths = self._lengths(planned.indptr, planned.last_page_len)
        self._check(ids.flatten(), starts, lengths, indices, inputs.slots, None)

    def went_back(self, slots: Tensor, tokens: Tensor, counts: Tensor, lengths: Tensor) -> None:
        """Take the tokens that are forgotten out of the rows' chains; see ``StepTap``."""
        new = tokens.shape[1]
        each = torch.arange(new, device=tokens.device)
        positions = lengths.long()[:, None] - 2 * new + each  # lengths are those of the next step
        positions = torch.where(each < counts[:, None], -1, positions)
        before = chain_before(self.chains[slots], tokens.long(), positions)
        self.chains.index_copy_(0, slots, before)

    def _check(
        self, ids: Tensor, starts: Tensor, lengths: Tensor, indices: Tensor, places: Tensor, qo_indptr: Tensor | None
    ) -> None:
        table = (starts, lengths, indices, places)
        check_pages(self.tags, self.chains, self.faults, ids, *table, self.row_numbers, qo_indptr)

    def _lengths(self, indptr: Tensor, last_page_len: Tensor) -> Tensor:
        """Return ``[B]`` int32, the tokens of each row."""
        return (indptr.diff() - 1) * self.tags.shape[1] + last_page_len


class RowChain(RowWatch):
    """The chain of a row's tokens."""

    def __init__(self, chain: int | None = CHAIN_KNOWN + CHAIN_ORIGIN) -> None:
        # ``CHAIN_KNOWN`` and it, see ``check_pages`` of the ops; ``CHAIN_ADOPTED`` if only the row's last tag says it,
        # None if the device has it, in the row's slot or where the row waits for one
        self.chain = chain

    def begins(self, ids: NDArray[np.int64]) -> None:
        self.chain = CHAIN_KNOWN + chain_after(ids)

    def changed(self, length: int) -> None:
        """Let it be that of the last tag, unless there are no tokens: the host does not know them."""
        self.chain = CHAIN_ADOPTED if length else CHAIN_KNOWN + CHAIN_ORIGIN

    def lost(self) -> None:
        if self.chain is None:
            self.chain = CHAIN_ADOPTED

    def shared(self) -> RowChain:
        return RowChain(CHAIN_ADOPTED if self.chain is None else self.chain)


class PageCheck(RunnerTap):
    """A tap that has steps check pages, and looks at what they find."""

    row = RowChain

    @staticmethod
    def columns(places: int) -> dict[str, tuple[int, torch.dtype]]:
        return {"chain": (places, torch.int64), "row_number": (places, torch.int32)}

    def __init__(
        self, config: WrapConfig, pages: int, arena: Arena, staging: Staging, memory: ReleasableMemory
    ) -> None:
        device = arena["chain"].device
        self._raises = config.check_pages == "raise"
        self._arena, self._staging, self._device = arena, staging, device
        self._page_size = config.page_size
        tags = mark_static(memory.zeros((pages, config.page_size, 2), torch.int32))
        torch._dynamo.mark_dynamic(tags, 0)  # as pages are: how many there are is not built into the code
        self._none = torch.tensor([0, NO_FAULT], device=device)
        faults = mark_static(self._none.clone())
        self.inputs = self._tags = PageTags(tags, arena["chain"], arena["row_number"], faults)
        self.carried, self.nbytes = [arena["chain"]], tags.nbytes
        self.found = 0  # how many tags have been found wrong
        self._logged = False
        self._rows: weakref.WeakValueDictionary[int, Row] = weakref.WeakValueDictionary()
        self._entered: dict[int, int] = {}  # numbers of rows, by their places
        self._readbacks, self._arriving, self._launches = Readbacks(), cast("Readback | None", None), 0

    # ---- chains of rows

    def placed(self, rows: Sequence[Row], places: Sequence[int], new: Sequence[int]) -> None:
        """Write the chains that the host knows, and numbers of rows that are new at their places."""
        named = [
            (place, row) for place, row in zip(places, rows, strict=True) if self._entered.get(place) != row.number
        ]
        self._write("row_number", {place: row.number for place, row in named}, np.int32)
        for place, row in named:
            self._entered[place], self._rows[row.number % 2**FAULT_ROW_BITS] = row.number, row
        chains = [_chain(row).chain for row in rows]
        known = {
            place: _with_length(chain, row.exact_length - count)
            for place, row, chain, count in zip(places, rows, chains, new, strict=True)
            if chain is not None or row.slot is None
        }
        self._write("chain", known, np.int64)

    def _write(self, column: str, values: Mapping[int, int], dtype: type[np.int32 | np.int64]) -> None:
        if values:
            self._arena.write(column, np.array([*values], dtype=np.int64), np.array([*values.values()], dtype=dtype))

    def stored(self, rows: Sequence[Row], ids: Sequence[NDArray[np.int64]] | None = None) -> None:
        """Let the chains of rows, grown by their new tokens, go on with these; see ``RunnerTap``."""
        for at, row in enumerate(rows):
            watch = _chain(row)
            before, watch.chain = watch.chain, None
            if ids is not None and before is not None:
                watch.chain = chain_with(before, ids[at], row.exact_length - len(ids[at]))
            if row.slot is None:
                watch.lost()

    # ---- pages that no program writes

    def copied(self, source: Tensor, target: Tensor) -> None:
        self._tags.tags.index_copy_(0, target, self._tags.tags.index_select(0, source))

    def imported(self, rows: Sequence[Row], places: Sequence[int], ids: Sequence[NDArray[np.int64]]) -> None:
        """Tag the new tokens; those that nobody knows, by position alone."""
        counts = [*map(len, ids)]
        if not any(counts):
            return
        self.placed(rows, places, counts)
        self._arena.flush()
        table = build_table(rows, counts, self._page_size, len(rows))
        columns: list[NDArray[Any]] = [
            np.concatenate(ids),
            table.indptr[:-1].copy(),
            np.array([row.exact_length for row in rows], dtype=np.int32),
            table.indices,
            np.array(places, dtype=np.int64),
            table.qo_indptr,
        ]
        tags, chains, numbers, faults = self._tags
        new, starts, lengths, indices, slots, qo_indptr = self._staging.to_device(columns)
        check_pages(tags, chains, faults, new, starts, lengths, indices, slots, numbers, qo_indptr)
        self.stored(rows, ids)

    # ---- faults

    def inspect(self) -> None:
        """Look, now and then, at what the steps that have ended found, and wait for none, or raise WrongPageError."""
        if self._device.type != "cuda":
            self._judge(self._tags.faults.tolist())
            return
        self._launches += 1
        if (arriving := self._arriving) is not None:
            if arriving.arrived:
                self._arriving = None
                self._judge(arriving.array().tolist())
        elif self._raises or self._launches % _LAUNCHES_BETWEEN_LOOKS == 0:
            self._arriving = self._readbacks.start(self._tags.faults)

    def report(self) -> None:
        """Look at what all steps have found; otherwise as ``inspect``."""
        self._arriving = None
        self._judge(self._tags.faults.tolist())

    def faults(self) -> int:
        """Return how many tags were wrong so far, waiting for all steps."""
        return self.found + int(self._tags.faults[0])

    def _judge(self, faults: Sequence[int]) -> None:
        count, number = faults
        if not count:
            return
        self._tags.faults.copy_(self._none)
        self.found += count
        message = self._said(fault_of(number))
        if self._raises:
            raise WrongPageError(message)
        if not self._logged:
            self._logged = True
            logger.error("compiled_llm: %s; others are counted in stats().wrong_tags", message)

    def _said(self, fault: PageFault) -> str:
        row = self._rows.get(fault.row)
        name = "of a row that has ended" if row is None else row.name or "of a call"
        return (
            f"check_pages: row {fault.row} ({name}) has read page {fault.page} at position {fault.position}, and the "
            "page does not hold this row's tokens there; its output is wrong from that step on. This is a fault of "
            "compiled_llm's, please report it"
        )


def _chain(row: Row) -> RowChain:
    return cast(RowChain, row.watch)


def _with_length(chain: int | None, length: int) -> int:
    """Return a row's chain, after so many tokens, as ``check_pages`` takes it."""
    return CHAIN_ADOPTED + length if chain is None or chain < CHAIN_KNOWN else chain


def chain_with(chain: int, ids: NDArray[np.int64], first: int) -> int | None:
    """Return a row's chain with more tokens ``[T]``, from position ``first`` on; None if the host does not know it."""
    if chain < CHAIN_KNOWN or (ids < 0).any():
        return None
    return CHAIN_KNOWN + chain_after(ids, first, chain - CHAIN_KNOWN)


TAP: type[RunnerTap] = PageCheck
