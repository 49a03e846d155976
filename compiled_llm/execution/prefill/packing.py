"""The layout of packed tokens on their way through prefill: chunks of a bounded size, padding, captured shapes."""

# Shapes: B rows, T packed tokens, L tokens whose logits are wanted, C of them after which a token is sampled.

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from compiled_llm.compilation.graphs.step_key import Pooling, StepKey
from compiled_llm.execution.batch import Extension, ExtraInputs
from compiled_llm.kinds.rows import NO_ENTRY
from compiled_llm.kvcache.table import HostTable, Span, build_table

Holds = Callable[[int, int, int], bool]
"""Whether a launch may have so many tokens, pages and rows."""


class Chunk(NamedTuple):
    """The rows of one launch, and what is wanted of them."""

    rows: Sequence[Extension]
    keep: NDArray[np.int64]  # ``[L]`` ascending, the packed tokens whose logits are wanted
    slots: NDArray[np.int64]  # ``[C]``, those of the rows that end in it; or none
    wants: tuple[str, ...] = ()  # outputs of the model besides logits, by HuggingFace's names
    pooling: Pooling = ""  # in place of logits
    extra: ExtraInputs | None = None  # of one of the rows, if any has some

    def part(self, rows: Sequence[Extension], start: int, end: int) -> Chunk:
        """Return the part of packed tokens ``start`` to ``end``, which are those of ``rows``."""
        first, last = self.keep.searchsorted((start, end))
        return self._replace(rows=rows, keep=self.keep[first:last] - start, slots=self.slots[first:last])

    @property
    def queries(self) -> list[int]:
        """How many new tokens each row has."""
        return [len(extension.ids) for extension in self.rows]

    @property
    def lengths(self) -> list[int]:
        """How many tokens each row has, with the new ones."""
        return [extension.row.exact_length for extension in self.rows]


class Packed(NamedTuple):
    """A prefill on the host, in the order of ``PrefillInputs``, without page numbers."""

    ids: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    keep: NDArray[np.int64]  # [L]
    sampled: NDArray[np.int64]  # [C]
    slots: NDArray[np.int64]  # [C]
    places: NDArray[np.int64]  # [B], or [0] without taps
    token_rows: NDArray[np.int32]  # [T]
    token_positions: NDArray[np.int32]  # [T]
    qo_indptr: NDArray[np.int32]  # [B + 1]
    indptr: NDArray[np.int32]  # [B + 1]
    last_page_len: NDArray[np.int32]  # [B]
    read: NDArray[np.int32]  # [B], or [0] if rows have no states, as the next one
    write: NDArray[np.int32]  # [B]


def padded(batch: Sequence[Extension], shape: StepKey, page_size: int) -> list[Extension]:
    """Return the batch with rows of padding, so that it has exactly the tokens and rows of ``shape``."""
    nulls = [null_extension(0, page_size)] * (shape.rows - len(batch))
    return [*batch, *nulls, null_extension(shape.tokens - token_count(batch), page_size)]


def token_count(batch: Sequence[Extension]) -> int:
    return sum(len(extension.ids) for extension in batch)


@lru_cache(1024)
def null_extension(length: int, page_size: int) -> Extension:
    """Return a row of padding, whose tokens all go to the null page and to position 0, which every model has."""
    none = np.zeros(length, dtype=np.int64)
    none.flags.writeable = False
    row = Span.null(max(1, length), page_size)  # it has a page, with tokens or without
    return Extension(row, none, none)


def pack(
    batch: Sequence[Extension],
    keep: NDArray[np.int64],
    slots: NDArray[np.int64],
    page_size: int,
    padding: int | None = None,
    keeps_states: bool = False,
) -> tuple[Packed, HostTable]:
    """Lay out rows one after the other; returns the inputs of the program, and the page table that is planned."""
    # ``keep`` ``[L]`` are the tokens whose logits are wanted, ``slots`` ``[C]`` those of rows for which a token is
    # sampled after the first C of them; ``padding`` is its place, if there are taps.
    queries = [len(extension.ids) for extension in batch]
    table = build_table([extension.row for extension in batch], queries, page_size, len(batch))
    count = len(batch)
    sizes = (sum(queries), len(keep), len(slots), count, count * (padding is not None), count * keeps_states)
    packed = _allocated(*sizes)
    np.concatenate([extension.ids for extension in batch], out=packed.ids)
    np.concatenate([extension.positions for extension in batch], out=packed.positions)
    start = 0
    for number, (extension, count) in enumerate(zip(batch, queries, strict=True)):
        first, end = extension.row.exact_length - count, start + count
        packed.token_rows[start:end] = number
        packed.token_positions[start:end] = np.arange(first, first + count, dtype=np.int32)
        start = end
    packed.keep[:], packed.sampled[:], packed.slots[:] = keep, np.arange(len(slots)), slots
    packed.qo_indptr[:], packed.indptr[:], packed.last_page_len[:] = table.qo_indptr, table.indptr, table.last_page_len
    if padding is not None:
        packed.places[:] = [padding if extension.place < 0 else extension.place for extension in batch]
    if keeps_states:
        for at, extension in enumerate(batch):
            packed.read[at], packed.write[at] = extension.states
    return packed, table


def _allocated(tokens: int, wanted: int, sampled: int, rows: int, placed: int, entries: int) -> Packed:
    """Return columns that lie one after the other in one piece of memory."""
    wide = (tokens, tokens, wanted, sampled, sampled, placed)
    narrow = (tokens, tokens, rows + 1, rows + 1, rows, entries, entries)
    memory = np.empty(8 * sum(wide) + 4 * sum(narrow), np.uint8)
    columns: list[NDArray[Any]] = []
    for sizes, words in (
        (wide, memory[: 8 * sum(wide)].view(np.int64)),
        (narrow, memory[8 * sum(wide) :].view(np.int32)),
    ):
        ends = list(accumulate(sizes, initial=0))
        columns += [words[start:end] for start, end in pairwise(ends)]
    return Packed(*columns)


def as_bytes(packed: Packed) -> NDArray[np.uint8]:
    """Return the memory of all columns, which ``pack`` has laid out one after the other."""
    return cast(NDArray[np.uint8], packed.ids.base)


def chunks(
    batch: Sequence[Extension],
    most: int,
    page_size: int,
    holds: Holds | None = None,
    spare_states: tuple[int, int] = (NO_ENTRY, NO_ENTRY),
) -> Iterator[list[Extension]]:
    """Cut packed tokens into chunks of at most ``most``; the rest of a row attends to its earlier chunks in pages."""
    # ``holds`` tells whether a launch may have so many tokens, pages and rows; it may always have one token of any row.
    # The states of a row in between two chunks lie in ``spare_states``: at most one row is in two of them.
    chunk: list[Extension] = []
    tokens = pages = 0
    for extension in batch:
        start, count = 0, len(extension.ids)
        while start < count:
            before, part = extension.row.exact_length - count + start, min(count - start, most - tokens)
            if holds is not None:
                part = _that_fit(part, before, Taken(tokens, pages, len(chunk)), page_size, holds)
            if part:
                cut = _part(extension, start, start + part, page_size)
                spare_states = spare_states[1], spare_states[0]
                chunk.append(cut._replace(states=_states_of(extension, start, start + part, spare_states)))
                start, tokens, pages = start + part, tokens + part, pages - -(before + part) // page_size
            if tokens == most or start < count:
                assert chunk, "one token of any row fits"
                yield chunk
                chunk, tokens, pages = [], 0, 0
    if chunk:
        yield chunk


def _states_of(extension: Extension, start: int, stop: int, spare: tuple[int, int]) -> tuple[int, int]:
    """Return what a part of a row reads and writes: of ``spare`` the first, and the second, if it is cut there."""
    read, write = extension.states
    return spare[0] if start else read, write if stop == len(extension.ids) else spare[1]


class Taken(NamedTuple):
    """The numbers of tokens, pages and rows in a chunk so far."""

    tokens: int
    pages: int
    rows: int


def _that_fit(part: int, before: int, taken: Taken, page_size: int, holds: Holds) -> int:
    """Return how many of ``part`` new tokens of a row, after ``before`` others, a launch holds beside what it has."""

    def is_too_large(new: int) -> bool:
        return not holds(taken.tokens + new, taken.pages - -(before + new) // page_size, taken.rows + 1)

    return bisect.bisect_left(range(1, part + 1), True, key=is_too_large)


def _part(extension: Extension, start: int, stop: int, page_size: int) -> Extension:
    """Return tokens ``start`` to ``stop`` of an extension, with the row as it is once they are stored."""
    if (start, stop) == (0, len(extension.ids)):
        return extension
    length = extension.row.exact_length - len(extension.ids) + stop
    row = Span(extension.row.pages[: -(-length // page_size)], length)
    ends = extension.is_last and stop == len(extension.ids)
    ids = extension.ids[start:stop]
    extra = None if extension.extra is None else extension.extra.slice(start, stop)
    return Extension(row, ids, extension.positions[start:stop], ends, extension.place, extra=extra)
