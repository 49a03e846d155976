"""What is being done, on stderr: nothing is silent for more than two seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

logger = logging.getLogger("compiled_llm.progress")


class ProgressDisplay:
    """Shows one task after the other: on a terminal with a spinner and a clock, elsewhere as one line each."""

    def __init__(self, enabled: bool, animated: bool = True) -> None:
        """Choose what to show; tasks are logged in any case.

        Args:
            enabled: show anything.
            animated: use a spinner if stderr is a terminal.
        """
        self._enabled = enabled
        self._animated = animated
        self._is_showing = False

    @contextmanager
    def task(self, description: str) -> Iterator[Callable[[str], object]]:
        """Show ``description`` while the block runs; the block gets a function that says what it does next."""
        started = time.perf_counter()
        with self._shown(description, SpinnerColumn(), _text(), TimeElapsedColumn()) as update:
            yield lambda doing: update(description=doing)
        logger.info("%s: %.1f s", description, time.perf_counter() - started)

    @contextmanager
    def download(self, what: str, size: int) -> Iterator[Callable[[int | None], object]]:
        """Show a download of ``size`` bytes; the block gets a function that says how many have arrived, if known."""
        columns = (_text(), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with self._shown(f"downloading {what} ({size / 1e6:.0f} MB)", *columns, total=size) as update:
            yield lambda arrived: update(completed=arrived)

    @contextmanager
    def _shown(
        self, description: str, *columns: ProgressColumn, total: int | None = None
    ) -> Iterator[Callable[..., object]]:
        """Show a task unless another one of this display is shown; yield what changes it."""
        if not self._enabled or self._is_showing:
            yield lambda **_: None
            return
        self._is_showing = True
        try:
            console = Console(stderr=True)
            if self._animated and console.is_terminal:
                with Progress(*columns, console=console, transient=True) as progress:
                    yield partial(progress.update, progress.add_task(description, total=total))
            else:
                _print(console, description)
                yield partial(_print, console)
        finally:
            self._is_showing = False


def _text() -> TextColumn:
    return TextColumn("compiled_llm: {task.description}", markup=False)


def _print(console: Console, description: str = "", **_: object) -> None:
    if description:
        console.print(f"compiled_llm: {description}", soft_wrap=True, highlight=False, markup=False)
