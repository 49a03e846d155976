"""A terminal for a process: a test types into it and reads it."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"
PATIENCE = 60.0
_BEGIN = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
"""Have the terminal as one's own, so that Ctrl-C is a signal, and become the program."""


class Terminal:
    """What a process shows, and what is typed."""

    def __init__(self, ours: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process  # that runs in it
        self.shown = ""  # all that it has shown
        self._ours = ours
        self._seen = 0

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until(self, text: str, patience: float = PATIENCE) -> str:
        """Wait until a text is shown that was not waited for yet, and return what came before it."""
        deadline = time.monotonic() + patience
        while (found := self.shown.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, self.shown
            assert self._read(), f"it has ended: {self.shown}"
        before, self._seen = self.shown[self._seen : found], found + len(text)
        return before

    def _read(self) -> bool:
        if select.select([self._ours], [], [], 1.0)[0]:
            try:
                self.shown += os.read(self._ours, 2**16).decode(errors="replace")
            except OSError:  # no process has the other end
                return False
        return True

    def ended(self) -> int:
        """Wait for its end, and return the exit code."""
        deadline = time.monotonic() + PATIENCE
        while self._read():
            assert time.monotonic() < deadline, f"it does not end: {self.shown}"
        return self.process.wait(PATIENCE)


@contextmanager
def terminal(command: Sequence[str], **environment: str) -> Iterator[Terminal]:
    """A process in a terminal of its own; it is killed in the end."""
    ours, its = pty.openpty()
    begin = [sys.executable, "-S", "-c", _BEGIN, *command]
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "INPUTRC": "/dev/null", **environment}
    with subprocess.Popen(begin, stdin=its, stdout=its, stderr=its, start_new_session=True, env=environment) as process:
        os.close(its)
        try:
            yield Terminal(ours, process)
        finally:
            process.kill()
            os.close(ours)
