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

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.inputs import Pooling
from compiled_llm.compilation.program import PREFILL, with_outputs
from compiled_llm.execution.batch import Extension, ExtraInputs
from compiled_llm.kinds.rows import NO_ENTRY
from compiled_llm.kvcache.table import HostTable, Span, build_table

Holds = Callable[[int, int, int], bool]
"""Whether a launch may have so many tokens, pages and rows."""


class PrefillChunk(NamedTuple):
    """The rows of one launch, and what is wanted of them."""

    rows: Sequence[Extension]
    keep: NDArray[np.int64]  # ``[L]`` ascending, the packed tokens whose logits are wanted
    slots: NDArray[np.int64]  # ``[C]``, those of the rows that end in it; or none
    wants: tuple[str, ...] = ()  # outputs of the model besides logits, by HuggingFace's names
    pooling: Pooling = ""  # in place of logits
    extra: ExtraInputs | None = None  # of one of the rows, if any has some

    def part(self, rows: Sequence[Extension], start: int, end: int) -> PrefillChunk:
        """Return the part of packed tokens ``start`` to ``end``, which are those of ``rows``."""
        first, last = self.keep.searchsorted((start, end))
        return self._replace(rows=rows, keep=self.keep[first:last] - start, slots=self.slots[first:last])

    @property
    def program(self) -> str:
        """The name of the program that runs it; another one may if no row has cached tokens."""
        name = PREFILL if self.extra is None else self.extra.program.name
        return with_outputs(name, (f"pooled {self.pooling}",) if self.pooling else self.wants)

    @property
    def queries(self) -> list[int]:
        """How many new tokens each row has."""
        return [len(extension.ids) for extension in self.rows]

    @property
    def lengths(self) -> list[int]:
        """How many tokens each row has, with the new ones."""
        return [extension.row.exact_length for extension in self.rows]


NO_ROWS = PrefillChunk([], np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


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
    chunk: PrefillChunk, page_size: int, padding: int | None = None, keeps_states: bool = False
) -> tuple[Packed, HostTable]:
    """Lay out rows one after the other; returns the inputs of the program, and the page table that is planned."""
    # A token is sampled after the first C of the tokens whose logits are wanted; ``padding`` is its place, if there are
    # taps.
    batch, queries = chunk.rows, chunk.queries
    tokens, wanted, sampled, count = sum(queries), len(chunk.keep), len(chunk.slots), len(batch)
    placed, entries = count * (padding is not None), count * keeps_states
    table = build_table([extension.row for extension in batch], queries, page_size, count)
    packed = _allocated(
        (tokens, tokens, wanted, sampled, sampled, placed),
        (tokens, tokens, count + 1, count + 1, count, entries, entries),
    )
    np.concatenate([extension.ids for extension in batch], out=packed.ids)
    np.concatenate([extension.positions for extension in batch], out=packed.positions)
    start = 0
    for number, (extension, new) in enumerate(zip(batch, queries, strict=True)):
        first, end = extension.row.exact_length - new, start + new
        packed.token_rows[start:end] = number
        packed.token_positions[start:end] = np.arange(first, first + new, dtype=np.int32)
        start = end
    packed.keep[:] = chunk.keep
    packed.sampled[:] = np.arange(sampled)
    packed.slots[:] = chunk.slots
    packed.qo_indptr[:] = table.qo_indptr
    packed.indptr[:] = table.indptr
    packed.last_page_len[:] = table.last_page_len
    if padding is not None:
        packed.places[:] = [padding if extension.place < 0 else extension.place for extension in batch]
    if keeps_states:
        for at, extension in enumerate(batch):
            packed.read[at], packed.write[at] = extension.states
    return packed, table


def _allocated(wide: Sequence[int], narrow: Sequence[int]) -> Packed:
    """Return columns of these sizes, one after the other in one piece of memory."""
    split = 8 * sum(wide)
    memory = np.empty(split + 4 * sum(narrow), np.uint8)
    return Packed(*_cut(memory[:split].view(np.int64), wide), *_cut(memory[split:].view(np.int32), narrow))


def _cut(words: NDArray[Any], sizes: Sequence[int]) -> list[NDArray[Any]]:
    return [words[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]


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
                spare_states = spare_states[1], spare_states[0]
                chunk.append(_part(extension, start, start + part, page_size, spare_states))
                start, tokens, pages = start + part, tokens + part, pages - -(before + part) // page_size
            if tokens == most or start < count:
                assert chunk, "one token of any row fits"
                yield chunk
                chunk, tokens, pages = [], 0, 0
    if chunk:
        yield chunk


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


def _part(extension: Extension, start: int, stop: int, page_size: int, spare: tuple[int, int]) -> Extension:
    """Return tokens ``start`` to ``stop`` of an extension, with the row as it is once they are stored."""
    # If it is cut there, its state is read from the first of the ``spare`` entries, and written to the second.
    count = len(extension.ids)
    if (start, stop) == (0, count):
        return extension
    length = extension.row.exact_length - count + stop
    read, write = extension.states
    return extension._replace(
        row=Span(extension.row.pages[: -(-length // page_size)], length),
        ids=extension.ids[start:stop],
        positions=extension.positions[start:stop],
        is_last=extension.is_last and stop == count,
        states=(spare[0] if start else read, write if stop == count else spare[1]),
        extra=None if extension.extra is None else extension.extra.slice(start, stop),
    )
