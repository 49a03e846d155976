"""The worker process that compiles an engine's grammars, as the engine's process sees it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from compiled_llm.engine.apart.exchange import Failed, received
from compiled_llm.engine.apart.fork_server_process import ForkServerProcess
from compiled_llm.engine.grammars.worker_messages import (
    MAX_BYTES,
    Compile,
    Compiled,
    FromWorker,
    Vetted,
    WorkerVocabulary,
)

_SCRIPT = Path(__file__).with_name("worker_script.py")
_LOST = Failed("lost", "the process that compiles grammars has ended")


class WorkerProcess(ForkServerProcess):
    """The worker's process, which is told of vocabularies before it compiles for them."""

    def __init__(self) -> None:
        self._learned: dict[int, WorkerVocabulary] = {}  # what it knows, by number
        super().__init__(_SCRIPT, MAX_BYTES, ["alone"])

    def learn(self, vocabulary: WorkerVocabulary) -> None:
        """Have it know the tokens of a vocabulary in place of others with that number."""
        with self._lock, suppress(OSError):  # it cannot be started; a grammar that is to be compiled says so
            self._retried(lambda: self._teach(vocabulary))

    def compile(
        self, asked: Compile, vocabulary: WorkerVocabulary, wanted: Callable[[], bool]
    ) -> Compiled | Vetted | Failed:
        """Have a grammar compiled, and wait for it; UnwantedError once ``wanted`` returns False."""
        answer: Compiled | Vetted | Failed | None = self.answered(
            lambda: self._begun(asked, vocabulary), FromWorker, wanted
        )
        return answer or _LOST

    # ---- under the lock

    def _began(self) -> None:
        self._learned.clear()

    def _begun(self, asked: Compile, vocabulary: WorkerVocabulary) -> socket.socket:
        self._teach(vocabulary)
        return self._ask(asked)

    def _teach(self, vocabulary: WorkerVocabulary) -> None:
        if self._learned.get(vocabulary.number) is vocabulary:
            return
        with self._ask(vocabulary) as end:
            if received(end, FromWorker, MAX_BYTES) is None:
                raise ConnectionError("it has died meanwhile")
        self._learned[vocabulary.number] = vocabulary
