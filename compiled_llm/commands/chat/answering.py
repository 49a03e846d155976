"""Writes one answer as it comes; Ctrl-C ends it, and nothing else."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext

from compiled_llm.commands.chat.partner import Handle
from compiled_llm.execution.reporting.progress import ProgressDisplay

_SILENT_SECONDS = 0.5
"""After which it is said that an answer is on its way."""

Write = Callable[[str], None]


def write_answer(handle: Handle, write: Write, interactive: bool, quiet: bool) -> bool:
    """Write an answer, and return whether Ctrl-C has ended it.

    Args:
        handle: of the request.
        write: takes pieces of the answer.
        interactive: Ctrl-C ends the answer alone; else it is raised as ever.
        quiet: do not say that the answer is on its way.

    Raises:
        Exception: why the request was refused, or has failed.
    """
    try:
        return asyncio.run(_written(handle, write, interactive, quiet))
    finally:
        handle.cancel()  # whatever kept the answer from being read


async def _written(handle: Handle, write: Write, interactive: bool, quiet: bool) -> bool:
    with _interruptions(handle, interactive) as interruptions:
        await _copy(handle.text().__aiter__(), write, quiet)
        return bool(interruptions)


@contextmanager
def _interruptions(handle: Handle, interactive: bool) -> Iterator[list[bool]]:
    """Have Ctrl-C end a request in the block, if ``interactive``; what is yielded is no longer empty then."""
    interruptions: list[bool] = []
    if not interactive:
        yield interruptions
        return

    def interrupt() -> None:
        interruptions.append(True)
        handle.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupt)  # not in the midst of anything, as KeyboardInterrupt would be
    try:
        yield interruptions
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _copy(pieces: AsyncIterator[str], write: Write, quiet: bool) -> None:
    first = asyncio.ensure_future(anext(pieces, ""))
    await asyncio.wait([first], timeout=_SILENT_SECONDS)
    display = ProgressDisplay(not quiet, brief=True)
    with nullcontext() if first.done() else display.task("reading the question"):
        piece = await first
    write(piece)
    async for piece in pieces:
        write(piece)
