"""The layout of packed tokens on their way through prefill: chunks of a bounded size, padding, recorded shapes.

Shapes: B rows, T packed tokens, L tokens whose logits are wanted, C of them after which a token is chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from compiled_llm.kvcache.pool import HostTable, Span, Stored, build_table

# From 64 tokens on the room left for padding stays under a quarter, and from 128 on all are multiples of 64: products
# are computed in tiles of so many tokens.
_RECORDED_TOKENS = (
    *(16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048),
    *(2560, 3072, 3584, 4096),
)
# On an H200 a layer of so many weights, times tokens, takes twice as long as it takes a host to launch its kernels.
_DEVICE_BOUND = 2**38


class Extension(NamedTuple):
    """New tokens of one row.

    Attributes:
        row: already grown by them.
        ids: ``[Q]`` int64.
        positions: ``[Q]`` int64, rotary positions.
    """

    row: Stored
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]


class Shape(NamedTuple):
    """What a recorded prefill is fixed to.

    Attributes:
        tokens: T.
        rows: rows that choose a token; B is one more, whose tokens, if any are missing, fill up T.
        split: whether several blocks share the keys of a row.
    """

    tokens: int
    rows: int
    split: bool = False


class Packed(NamedTuple):
    """A prefill on the host, in the order of ``compile.PrefillInputs``, page numbers left out.

    Attributes:
        ids: ``[T]`` int64.
        positions: ``[T]`` int64.
        keep: ``[L]`` int64.
        ends: ``[C]`` int64.
        slots: ``[C]`` int64.
        token_rows: ``[T]`` int32.
        token_positions: ``[T]`` int32.
        qo_indptr: ``[B + 1]`` int32.
        indptr: ``[B + 1]`` int32.
        last_page_len: ``[B]`` int32.
    """

    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    keep: NDArray[np.int64]
    ends: NDArray[np.int64]
    slots: NDArray[np.int64]
    token_rows: NDArray[np.int32]
    token_positions: NDArray[np.int32]
    qo_indptr: NDArray[np.int32]
    indptr: NDArray[np.int32]
    last_page_len: NDArray[np.int32]


class RecordedShapes:
    """The shapes that prefills are padded to and recorded in.

    The device takes longer over many tokens than the host takes to launch them: those are not worth recording.
    """

    def __init__(self, max_rows: int, weights: int) -> None:
        """Choose them.

        Args:
            max_rows: most rows there can be.
            weights: numbers in the matrices of a layer.
        """
        most = max(2, max_rows)  # a symbolic size is at least 2
        tokens = [tokens for tokens in _RECORDED_TOKENS if tokens * weights <= _DEVICE_BOUND]
        self._by_rows = {
            rows: [Shape(count, rows) for count in tokens if count >= rows] for rows in sorted({2, min(8, most), most})
        }

    def of(self, rows: int) -> list[Shape]:
        """Return the shapes of prefills of so many rows, smallest first."""
        return next(shapes for most, shapes in self._by_rows.items() if most >= rows)

    def all(self) -> list[Shape]:
        """Return the shapes of prefills of any number of rows."""
        return [*itertools.chain.from_iterable(self._by_rows.values())]

    def smallest(self, tokens: int, rows: int) -> Shape | None:
        """Return the smallest shape that holds a prefill of so many tokens, or None for one too large for all."""
        return next((shape for shape in self.of(rows) if shape.tokens >= tokens), None)


def padded(batch: Sequence[Extension], shape: Shape, page_size: int) -> list[Extension]:
    """Return the batch with rows of padding, so that it has exactly the tokens and rows of ``shape``."""
    nulls = [null_extension(0, page_size)] * (shape.rows - len(batch))
    return [*batch, *nulls, null_extension(shape.tokens - token_count(batch), page_size)]


def token_count(batch: Sequence[Extension]) -> int:
    """Return T."""
    return sum(len(extension.ids) for extension in batch)


def null_extension(length: int, page_size: int) -> Extension:
    """Return a row of padding, whose tokens all go to the null page and to position 0, which every model has."""
    none = np.zeros(length, dtype=np.int64)
    return Extension(Span.null(max(1, length), page_size), none, none)  # a row has a page, whether it has tokens or not


def pack(
    batch: Sequence[Extension], keep: NDArray[np.int64], slots: NDArray[np.int64], page_size: int
) -> tuple[Packed, HostTable]:
    """Lay out rows one after the other.

    Args:
        batch: the rows.
        keep: ``[L]``, the tokens whose logits are wanted.
        slots: ``[C]``, how tokens are chosen after the first C of them.
        page_size: S.

    Returns:
        What the program reads, and the page table that is planned.
    """
    queries = [len(extension.ids) for extension in batch]
    table = build_table([extension.row for extension in batch], queries, page_size, len(batch))
    starts = [extension.row.length - count for extension, count in zip(batch, queries, strict=True)]
    packed = Packed(
        ids=np.concatenate([extension.ids for extension in batch]),
        positions=np.concatenate([extension.positions for extension in batch]),
        keep=keep.astype(np.int64),
        ends=np.arange(len(slots), dtype=np.int64),
        slots=slots,
        token_rows=np.repeat(np.arange(len(batch), dtype=np.int32), queries),
        token_positions=np.concatenate(
            [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, queries, strict=True)]
        ),
        qo_indptr=table.qo_indptr,
        indptr=table.indptr,
        last_page_len=table.last_page_len,
    )
    return packed, table


def as_bytes(packed: Packed) -> NDArray[np.uint8]:
    """Return all columns, one after the other."""
    return np.concatenate([column.view(np.uint8) for column in packed])


def chunks(batch: Sequence[Extension], most: int, page_size: int) -> Iterator[list[Extension]]:
    """Cut packed tokens into chunks of at most ``most``; a row that is cut attends to its earlier chunks in pages."""
    chunk: list[Extension] = []
    room = most
    for extension in batch:
        start, count = 0, len(extension.ids)
        while start < count:
            stop = min(count, start + room)
            chunk.append(_part(extension, start, stop, page_size))
            room -= stop - start
            start = stop
            if room == 0:
                yield chunk
                chunk, room = [], most
    if chunk:
        yield chunk


def _part(extension: Extension, start: int, stop: int, page_size: int) -> Extension:
    """Return tokens ``start`` to ``stop`` of an extension, with the row as it is once they are stored."""
    if (start, stop) == (0, len(extension.ids)):
        return extension
    length = extension.row.length - len(extension.ids) + stop
    row = Span(extension.row.pages[: -(-length // page_size)], length)
    return Extension(row, extension.ids[start:stop], extension.positions[start:stop])
