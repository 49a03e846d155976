"""The host's part of the check that rows read their own pages: the rows' chains, and what becomes of a fault.

A row's chain is on the host for as long as the host knows its tokens, and on the device, in the row's slot, from the
first decode step on. Where neither has it, since the row was forked, rewound or kept, that of its last tag counts once.

Shapes: B rows, T packed tokens, X slots.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.inputs import PageCheck
from compiled_llm.compilation.page_checks import CHAIN_IN_SLOT
from compiled_llm.config import WrapConfig
from compiled_llm.execution.batch import Extension, RowTag
from compiled_llm.execution.state.arena import Arena
from compiled_llm.execution.state.staging import Readback, Readbacks, Staging
from compiled_llm.kvcache.memory import mark_static
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm.kvcache.row import Row
from compiled_llm.kvcache.table import build_table
from compiled_llm_ops import check_pages
from compiled_llm_ops.attention.check_pages import PageFault, chain_after, chain_before, fault_of
from compiled_llm_ops.contracts import CHAIN_ADOPTED, CHAIN_KNOWN, FAULT_ROW_BITS, NO_FAULT

logger = logging.getLogger("compiled_llm.pages")

_LAUNCHES_BETWEEN_LOOKS = 16
"""With ``check_pages="log"``; a fault stays where it is noted."""


class WrongPageError(RuntimeError):
    """A row has read a page that is not its own: its tokens are wrong from there on."""


class PageWatch:
    """Has steps check pages, and looks at what they find; in the model's executor only.

    Attributes:
        inputs: of the programs.
        found: how many tags have been found wrong.
    """

    @staticmethod
    def columns(slots: int) -> dict[str, tuple[int, torch.dtype]]:
        """Return the columns of an arena for this many slots."""
        return {"chain": (slots + 1, torch.int64), "row_number": (slots + 1, torch.int32)}

    def __init__(
        self, config: WrapConfig, pages: int, arena: Arena, staging: Staging, memory: ReleasableMemory
    ) -> None:
        """Allocate the tags of so many pages, in the memory of these."""
        device = arena["chain"].device
        self._raises = config.check_pages == "raise"
        self._arena, self._staging, self._device = arena, staging, device
        self._page_size = config.page_size
        tags = mark_static(memory.zeros((pages, config.page_size, 2), torch.int32))
        torch._dynamo.mark_dynamic(tags, 0)  # as pages are: how many there are is not built into the code
        self._none = torch.tensor([0, NO_FAULT], device=device)
        faults = mark_static(self._none.clone())
        self.inputs = PageCheck(tags, arena["chain"], arena["row_number"], faults)
        self.found = 0
        self._logged = False
        self._rows: weakref.WeakValueDictionary[int, Row] = weakref.WeakValueDictionary()
        self._entered: dict[int, int] = {}  # numbers of rows, by their slots
        self._readbacks, self._arriving, self._launches = Readbacks(), cast("Readback | None", None), 0

    @property
    def nbytes(self) -> int:
        """Bytes outside the arena."""
        return self.inputs.tags.nbytes

    # ---- chains of rows

    def tagged(self, extension: Extension) -> Extension:
        """Return an extension that says what its row's new tokens follow; the row has grown by them."""
        row = cast(Row, extension.row)
        in_slot = row.chain is None and row.slot is not None
        chain = CHAIN_IN_SLOT if in_slot else _with_length(row.chain, row.length - len(extension.ids))
        self._name([row])
        return extension._replace(tag=RowTag(chain, -1 if row.slot is None else row.slot, row.number))

    def stored(self, extensions: Iterable[Extension], embedded: bool = False) -> None:
        """Let the chains of rows, grown by their new tokens, go on with these: a launch has tagged them."""
        for extension in extensions:
            row, count = cast(Row, extension.row), len(extension.ids)
            chain = None if row.chain is None else chain_with(row.chain, extension.ids, row.length - count, embedded)
            in_slot = chain is None and row.slot is not None
            row.chain = None if in_slot else CHAIN_ADOPTED if chain is None else chain

    def enter(self, rows: Sequence[Row], new_tokens: int) -> None:
        """Write what the slots of rows lack, already grown by the tokens that they are about to decode.

        From then on their chains are on the device.
        """
        if new := [row for row in rows if self._entered.get(cast(int, row.slot)) != row.number]:
            slots, numbers = [cast(int, row.slot) for row in new], [row.number for row in new]
            self._arena.write("row_number", np.array(slots, dtype=np.int64), np.array(numbers, dtype=np.int32))
            self._entered.update(zip(slots, numbers, strict=True))
            self._name(new)
        if known := [row for row in rows if row.chain is not None]:
            slots = [cast(int, row.slot) for row in known]
            chains = [_with_length(row.chain, row.length - new_tokens) for row in known]
            self._arena.write("chain", np.array(slots, dtype=np.int64), np.array(chains, dtype=np.int64))
            for row in known:
                row.chain = None

    def _name(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._rows[row.number % 2**FAULT_ROW_BITS] = row

    def go_back(self, slots: Tensor, tokens: Tensor, counts: Tensor, lengths: Tensor) -> None:
        """Let rows forget the last tokens of a step that has run, on the device.

        Args:
            slots: ``[B]`` int64.
            tokens: ``[B, q]``, which they have fed in.
            counts: ``[B]`` int64, how many of them count.
            lengths: ``[B]`` int32, with the next tokens and none forgotten.
        """
        new = tokens.shape[1]
        each = torch.arange(new, device=tokens.device)
        positions = lengths.long()[:, None] - 2 * new + each  # lengths are those of the next step
        positions = torch.where(each < counts[:, None], -1, positions)
        chains = self.inputs.chains
        chains.index_copy_(0, slots, chain_before(chains[slots], tokens.long(), positions))

    # ---- pages that no program writes

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        self.inputs.tags.index_copy_(0, target, self.inputs.tags.index_select(0, source))

    def imported(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Tag what was written to the ends of rows without their tokens being known, by position alone."""
        ids = [np.zeros(count, dtype=np.int64) for count in counts]
        extensions = [Extension(row, own, own) for row, own in zip(rows, ids, strict=True) if len(own)]
        if not extensions:
            return
        tags = [self.tagged(extension).tag for extension in extensions]
        lengths = np.array([extension.row.length for extension in extensions], dtype=np.int32)
        queries = [len(extension.ids) for extension in extensions]
        table = build_table([extension.row for extension in extensions], queries, self._page_size, len(tags))
        chains = self.inputs.chains.clone()
        begins = [int(chains[tag.slot]) if tag.chain == CHAIN_IN_SLOT else tag.chain for tag in tags]
        columns: list[NDArray[Any]] = [
            np.concatenate([extension.ids for extension in extensions]),
            table.indptr[:-1].copy(),
            lengths,
            np.arange(len(tags)),
            np.array([tag.number for tag in tags], dtype=np.int32),
            table.qo_indptr,
            np.array(begins, dtype=np.int64),
            table.indices,
        ]
        ids_, starts, lengths_, slots, numbers, qo_indptr, chains, indices = self._staging.to_device(columns)
        tensors = (ids_, starts, lengths_, indices, slots, numbers, qo_indptr)
        check_pages(self.inputs.tags, chains, self.inputs.faults, *tensors)
        self.stored(extensions)

    # ---- faults

    def launched(self) -> None:
        """Look, now and then, at what the steps that have ended found, and wait for none.

        Raises:
            WrongPageError: a row has read a page that is not its own; with ``check_pages="raise"``.
        """
        if self._device.type != "cuda":
            self._judge(self.inputs.faults.tolist())
            return
        self._launches += 1
        if (arriving := self._arriving) is not None:
            if arriving.arrived:
                self._arriving = None
                self._judge(arriving.array().tolist())
        elif self._raises or self._launches % _LAUNCHES_BETWEEN_LOOKS == 0:
            self._arriving = self._readbacks.start(self.inputs.faults)

    def look(self) -> None:
        """Look at what all steps have found, waiting for them; otherwise as ``launched``."""
        self._arriving = None
        self._judge(self.inputs.faults.tolist())

    def count(self) -> int:
        """Return how many tags were wrong so far, waiting for all steps."""
        return self.found + int(self.inputs.faults[0])

    def _judge(self, faults: Sequence[int]) -> None:
        count, number = faults
        if not count:
            return
        self.inputs.faults.copy_(self._none)
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


def _with_length(chain: int | None, length: int) -> int:
    """Return a row's chain, after so many tokens, as ``check_pages`` takes it."""
    return CHAIN_ADOPTED + length if chain is None or chain < CHAIN_KNOWN else chain


def chain_with(chain: int, ids: NDArray[np.int64], first: int, embedded: bool = False) -> int | None:
    """Return a row's chain with more tokens ``[T]``, from position ``first`` on; None if the host does not know it."""
    if chain < CHAIN_KNOWN or (not embedded and (ids < 0).any()):
        return None
    return CHAIN_KNOWN + chain_after(np.zeros_like(ids) if embedded else ids, first, chain - CHAIN_KNOWN)
