"""A worker process, as the process that has tasks for it sees it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from compiled_llm.engine.apart.exchange import NEXT, received
from compiled_llm.protocol.frames import frame_of

_LOOKING = 0.1
"""Seconds between two looks whether an answer is still wanted."""
_PATIENCE = 2.0
"""Seconds that it has to end."""
T = TypeVar("T")


class ForkServerProcess:
    """A worker's process, started again if it has died; any thread may use it."""

    # The worker ends with this process, in whatever way: its standard input is a socket that only this process holds.

    def __init__(self, script: Path, max_bytes: int, arguments: Sequence[str] = ()) -> None:
        """Start a ``script`` with ``arguments``, after which come the folders of modules; it runs a ``ForkServer``.

        Args:
            max_bytes: of a message.
        """
        self._script, self._arguments, self._max_bytes = script, arguments, max_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._start()

    @property
    def pid(self) -> int:
        """Of the process that runs now, or has run last."""
        assert self._process is not None, "it was never started"
        return self._process.pid

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    def answered(self, begin: Callable[[], socket.socket], message: object, wanted: Callable[[], bool]) -> Any:
        """Return the answer to a task that ``begin`` asks for, under the lock; None if the process has ended.

        Raises:
            UnwantedError: ``wanted`` returns False.
        """
        try:
            with self._lock:
                end = self._retried(begin)
        except OSError:
            return None
        with end:  # what it does for this end of the pair ends with it
            end.settimeout(_LOOKING)
            return received(end, message, self._max_bytes, wanted)

    # ---- under the lock

    def _began(self) -> None:
        """Forget what an earlier process knew."""

    def _retried(self, ask: Callable[[], T]) -> T:
        """Call ``ask``, again with a new process if this one has died; OSError if that dies, too."""
        try:
            return ask()
        except OSError:
            self._end()
            self._start()
            return ask()

    def _ask(self, message: Struct) -> socket.socket:
        """Return the end of a pair of sockets where the answer to a message comes."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._socket, [NEXT], [theirs.fileno()])
            ours.sendall(frame_of(message, self._max_bytes))
        except OSError:
            ours.close()
            raise
        return ours

    def _start(self) -> None:
        if self._closed:
            raise ConnectionError("it is closed")
        self._socket, theirs = socket.socketpair()
        self._began()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(self._script), *self._arguments, *_folders()],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},  # else NumPy starts threads
                start_new_session=True,  # Ctrl-C is for the process that ends this one
            )

    def _end(self) -> None:
        self._socket.close()
        if self._process is None:  # it could not be started
            return
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _folders() -> list[str]:
    """Return the folders that modules of this process come from, except the current one."""
    return [path for path in sys.path if os.path.isabs(path)]
