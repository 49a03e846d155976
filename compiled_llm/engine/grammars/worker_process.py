"""The worker process that compiles an engine's grammars, as the engine's process sees it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from compiled_llm.engine.grammars.worker_messages import (
    MAX_BYTES,
    NEXT,
    Compile,
    Compiled,
    Failed,
    FromWorker,
    Vetted,
    WorkerVocabulary,
    received,
)
from compiled_llm.protocol.frames import frame_of

_SCRIPT = Path(__file__).with_name("worker_script.py")
_LOOKING = 0.1
"""Seconds between two looks whether a grammar is still wanted."""
_PATIENCE = 2.0
"""Seconds that it has to end."""
T = TypeVar("T")
_LOST = Failed("lost", "the process that compiles grammars has ended")


class WorkerProcess:
    """The worker's process, started again if it has died; any thread may use it."""

    # The worker ends with this process, in whatever way: its standard input is a socket that only this process holds.

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._learned: dict[int, WorkerVocabulary] = {}  # what it knows, by number
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._start()

    @property
    def pid(self) -> int:
        """Of the process that runs now, or has run last."""
        assert self._process is not None, "it was never started"
        return self._process.pid

    def learn(self, vocabulary: WorkerVocabulary) -> None:
        """Have it know the tokens of a vocabulary in place of others with that number."""
        with self._lock, suppress(OSError):  # it cannot be started; a grammar that is to be compiled says so
            self._retried(lambda: self._teach(vocabulary))

    def compile(
        self, asked: Compile, vocabulary: WorkerVocabulary, wanted: Callable[[], bool]
    ) -> Compiled | Vetted | Failed:
        """Have a grammar compiled, and wait for it; UnwantedError once ``wanted`` returns False."""
        try:
            with self._lock:
                end = self._retried(lambda: self._begun(asked, vocabulary))
        except OSError:
            return _LOST
        with end:  # what it does for this end of the pair ends with it
            end.settimeout(_LOOKING)
            answer: Compiled | Vetted | Failed | None = received(end, FromWorker, wanted)
            return answer or _LOST

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    # ---- under the lock

    def _retried(self, ask: Callable[[], T]) -> T:
        """Call ``ask``, again with a new process if this one has died; OSError if that dies, too."""
        try:
            return ask()
        except OSError:
            self._end()
            self._start()
            return ask()

    def _begun(self, asked: Compile, vocabulary: WorkerVocabulary) -> socket.socket:
        self._teach(vocabulary)
        return self._ask(asked)

    def _teach(self, vocabulary: WorkerVocabulary) -> None:
        if self._learned.get(vocabulary.number) is vocabulary:
            return
        with self._ask(vocabulary) as end:
            if received(end, FromWorker) is None:
                raise ConnectionError("it has died meanwhile")
        self._learned[vocabulary.number] = vocabulary

    def _ask(self, message: WorkerVocabulary | Compile) -> socket.socket:
        """Return the end of a pair of sockets where the answer to a message comes."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._socket, [NEXT], [theirs.fileno()])
            ours.sendall(frame_of(message, MAX_BYTES))
        except OSError:
            ours.close()
            raise
        return ours

    def _start(self) -> None:
        if self._closed:
            raise ConnectionError("it is closed")
        self._socket, theirs = socket.socketpair()
        self._learned.clear()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_SCRIPT), "alone", *_folders()],
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
