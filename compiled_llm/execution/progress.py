"""What is being compiled or recorded, on stderr: nothing is silent for more than two seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

logger = logging.getLogger("compiled_llm.progress")


class ProgressDisplay:
    """Names one task after the other; on a terminal with a spinner and a clock, elsewhere one line each."""

    def __init__(self, enabled: bool) -> None:
        """Show tasks where ``enabled``; they are logged in any case."""
        self._enabled = enabled
        self._nested = False

    @contextmanager
    def task(self, description: str) -> Iterator[None]:
        """Show ``description`` while the block runs."""
        started = time.perf_counter()
        if not self._enabled or self._nested:
            yield
        else:
            self._nested = True
            try:
                with _shown(description):
                    yield
            finally:
                self._nested = False
        logger.info("%s: %.1f s", description, time.perf_counter() - started)


@contextmanager
def _shown(description: str) -> Iterator[None]:
    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(f"compiled_llm: {description}", soft_wrap=True, highlight=False)
        yield
        return
    columns = (SpinnerColumn(), TextColumn("compiled_llm: {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(description, total=None)
        yield
