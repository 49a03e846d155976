"""Rows grow by the tokens of a step before it is launched; if it fails, they are as before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """Grow each row by its count of tokens for the block, and yield whether pages were copied.

    If the block fails, the rows shrink again.

    Args:
        promise: pages that the rows may take together.
        copy_pages: copies pages that rows stop sharing.

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
