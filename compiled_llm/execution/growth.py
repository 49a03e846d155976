"""Rows grow by the tokens of a step before it is launched; if it fails, they are as before."""

# Where the device decides how many of them it accepts, lengths are upper bounds until ``sync_lengths``.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kvcache.pool import Promise
from compiled_llm.kvcache.row import PageCopy, Row


@contextmanager
def grown(
    rows: Sequence[Row],
    counts: Sequence[int],
    promise: Promise | None,
    copy_pages: Callable[[Sequence[PageCopy]], None],
) -> Iterator[bool]:
    """Grow each row by its tokens for the block, and shrink it if that fails; yield whether pages were copied.

    Raises:
        OutOfPagesError: a row has outgrown what it was promised, and no page is free; nothing has changed.
    """
    marks = [row.mark() for row in rows]
    try:
        with deferred(), _taking_from(promise):
            copies = [copy for row, count in zip(rows, counts, strict=True) for copy in row.grow(count)]
            if copies:
                copy_pages(copies)
        yield bool(copies)
    except BaseException:
        with deferred(), _taking_from(promise):
            for row, mark in zip(rows, marks, strict=True):
                row.restore(mark)
        raise


def _taking_from(promise: Promise | None) -> AbstractContextManager[None]:
    return nullcontext() if promise is None else promise.drawn_on()


def sync_lengths(rows: Iterable[Row]) -> None:
    """Make lengths and positions of rows exact; Ctrl-C comes while it waits for a step, or afterwards."""
    for row in rows:
        if row.speculation.unread:
            row.speculation.sync()
