"""Progress on stderr: no task is silent for more than two seconds, or in a pipe for more than thirty."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

logger = logging.getLogger("compiled_llm.progress")

Stage = Callable[[], str]


class TaskNumber(NamedTuple):
    """The number of a task among so many, counted from 1."""

    step: int
    steps: int

    def __str__(self) -> str:
        return f"{self.step} of {self.steps}"


class Watcher(Protocol):
    """A listener that hears of tasks."""

    def __call__(self, doing: str, step: int | None = None, steps: int | None = None) -> object:
        """Take a task in words, and which step it is of how many, if that is counted."""
        ...


_watchers: list[Watcher] = []

REMIND_AFTER = 30.0
"""Seconds after which a task that is not animated says that it is still running."""


@contextmanager
def watched(tell: Watcher) -> Iterator[None]:
    """Have ``tell`` hear of each task of this process while the block runs, shown or not, in the words of stderr."""
    _watchers.append(tell)
    try:
        yield
    finally:
        _watchers.remove(tell)


def _tell_watchers(doing: str, number: TaskNumber | None = None) -> None:
    for tell in tuple(_watchers):
        tell(doing, *(number or ()))


class ProgressDisplay:
    """A display of one task after the other: on a terminal with a spinner and a clock, elsewhere as lines."""

    def __init__(self, enabled: bool, animated: bool = True, brief: bool = False) -> None:
        """Tasks are logged in any case; ``brief`` shows, where there is no spinner, only those that have taken long."""
        self._enabled = enabled
        self._animated = animated
        self._brief = brief
        self._is_showing = False

    @contextmanager
    def task(
        self, description: str, stage: Stage = lambda: "", number: TaskNumber | None = None
    ) -> Iterator[Callable[[str], object]]:
        """Show ``description`` while the block runs; yields a function that changes it."""
        # ``stage`` returns how far the task is, in words, or nothing; it is called on another thread, now and then.
        started, last = time.perf_counter(), [description]
        columns = (SpinnerColumn(), _Doing(stage, beside=11), TimeElapsedColumn())
        with self._shown(description, *columns, stage=stage) as update:

            def change(doing: str) -> None:
                if doing != last[-1]:
                    last.append(doing)
                    update(description=doing)
                    _tell_watchers(doing, number)

            _tell_watchers(description, number)
            yield change
        logger.info("%s: %.1f s", last[-1], time.perf_counter() - started)

    @contextmanager
    def download(self, what: str, size: int) -> Iterator[Callable[[int | None], object]]:
        """Show a download of ``size`` bytes; yields a function that takes how many have arrived, if known."""
        _tell_watchers(f"downloading {what}")
        columns = (_Doing(beside=39), BarColumn(bar_width=12), DownloadColumn(), _Speed())
        with self._shown(f"downloading {what}", *columns, total=size) as update:
            yield lambda arrived: update(completed=arrived)

    @contextmanager
    def _shown(
        self, description: str, *columns: ProgressColumn, total: int | None = None, stage: Stage = lambda: ""
    ) -> Iterator[Callable[..., object]]:
        """Show a task unless another one of this display is shown; yields a function that changes it."""
        if not self._enabled or self._is_showing:
            yield lambda **_: None
            return
        self._is_showing = True
        try:
            console = Console(stderr=True, force_jupyter=False)  # in a notebook lines, as elsewhere without a terminal
            if self._animated and console.is_terminal:
                with Progress(*columns, console=console, transient=True) as progress:
                    yield partial(progress.update, progress.add_task(description, total=total, console=console))
            else:
                size = "" if total is None else f" ({total / 1e6:.0f} MB)"
                with _Lines(console, description + size, self._brief, stage) as lines:
                    yield lines.update
        finally:
            self._is_showing = False


class _Doing(ProgressColumn):
    """The description of a task and its stage, in the width that the other columns leave of one line."""

    max_refresh = 0.5

    def __init__(self, stage: Stage = lambda: "", beside: int = 0) -> None:
        super().__init__(Column(no_wrap=True, overflow="ellipsis"))
        self._stage = stage
        self._beside = beside

    def render(self, task: Task) -> Text:
        """Return both; if they are too long, the end of the description is left out."""
        doing, stage = f"compiled_llm: {task.description}", self._stage()
        too_long = len(_joined(doing, stage)) - (task.fields["console"].width - self._beside)
        return Text(_joined(f"{doing[: -too_long - 1]}…" if too_long > 0 else doing, stage))


class _Speed(TransferSpeedColumn):
    """The speed of a download once there is one, in a fixed width."""

    def render(self, task: Task) -> Text:
        shown = super().render(task)
        return Text(f"{'' if shown.plain == '?' else shown.plain:<10}", shown.style)


def _joined(description: str, stage: str) -> str:
    return f"{description}: {stage}" if stage else description


class _Lines:
    """A task in a pipe: a line for each description unless it is brief, and reminders after a while without one."""

    def __init__(self, console: Console, description: str, brief: bool, stage: Stage) -> None:
        self._stage = stage
        self._console = console
        self._brief = brief
        self._started = time.monotonic()
        self._ended = threading.Event()
        self._reminder = threading.Thread(target=self._remind, name="compiled_llm progress", daemon=True)
        self.update(description)

    def __enter__(self) -> _Lines:
        if not self._console.is_terminal:  # the program that draws there shows that it moves
            self._reminder.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def update(self, description: str = "", **_: object) -> None:
        if description:
            self._description = description
            if not self._brief:
                self._print(description)

    def _remind(self) -> None:
        while not self._ended.wait(REMIND_AFTER):
            self._print(f"still {_joined(self._description, self._stage())}, {time.monotonic() - self._started:.0f} s")

    def _print(self, text: str) -> None:
        self._console.print(f"compiled_llm: {text}", soft_wrap=True, highlight=False, markup=False)
