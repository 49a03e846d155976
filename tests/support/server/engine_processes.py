"""Engine processes to talk to, in a thread of this process or in their own; and a client that sends any bytes."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compiled_llm.engine.engine import Engine
from compiled_llm.protocol.frames import Frames, frame_of
from compiled_llm.protocol.messages import Beat, FromEngine, Hello, Problem, Ready, Welcome
from compiled_llm.server.engine_process.engine_server import EngineServer
from compiled_llm.server.engine_process.facts import ready_of
from compiled_llm.server.engine_process.kept_profile import KeptProfile
from compiled_llm.server.engine_process.operations import Operations

COMMAND = str(Path(sys.executable).with_name("compiled-llm"))
PATIENCE = 60.0


def until(condition: Callable[[], object]) -> None:
    """Wait for what follows from what has happened; what takes long, such as a server's start, is asked less often."""
    deadline, pause = time.monotonic() + PATIENCE, 0.01
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(pause)
        pause = min(1.1 * pause, 0.05)


class Loop:
    """An event loop in a thread, with an engine process in it."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.server = EngineServer(path, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self.server.start())

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call a function in the loop's thread."""

        async def calling() -> Any:
            return function(*arguments)

        return self.run(calling())

    def open(self, engine: Engine, tokenizer: Path | None = None, name: str = "tiny") -> None:
        """Be ready; it may name the folder of a tokenizer."""
        named = None if tokenizer is None else str(tokenizer)
        self.server.open(engine, ready_of(engine._model, engine, name, engine._tokenizer, named))

    def close(self, drain_seconds: float = 0.0) -> None:
        if self._loop.is_closed():
            return
        if self.server.leaving is None:
            self.call(self.server.stop_accepting, "the test is over")
        self.run(self.server.drain(drain_seconds))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()


@contextmanager
def engine_in_thread(engine: Engine, path: Path, tokenizer: Path | None = None, **options: Any) -> Iterator[Loop]:
    """An engine process that is ready, in a thread of this process; it may name the folder of a tokenizer."""
    loop = Loop(path, **options)
    loop.open(engine, tokenizer)
    try:
        yield loop
    finally:
        loop.close()


@contextmanager
def engine_that_names_its_tokenizer(engine: Engine) -> Iterator[Loop]:
    """An engine process as ``engine_in_thread``, in a folder of its own with its tokenizer."""
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        engine._tokenizer.save_pretrained(Path(folder) / "tokenizer")
        with engine_in_thread(engine, Path(folder) / "socket", Path(folder) / "tokenizer") as loop:
            yield loop


@contextmanager
def operating(
    engine: Engine, loop: Loop, path: Path, tokenizer: Path, profile: KeptProfile | None = None
) -> Iterator[Operations]:
    """The operations on an engine process that is ready; it has named the folder of a tokenizer."""
    operations = Operations(loop.server, path, profile)
    operations.start()
    operations.open(engine, ready_of(engine._model, engine, "tiny", engine._tokenizer, str(tokenizer)))
    try:
        yield operations
    finally:
        operations.close()


@contextmanager
def started_engine_process(
    folder: Path | str, path: Path, *options: str, command: Sequence[str] = (COMMAND,)
) -> Iterator[subprocess.Popen[str]]:
    """``compiled-llm serve``, which is killed in the end."""
    arguments = [*command, "serve", str(folder), "--uds", str(path), *options]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while "listening at" not in process.stderr.readline():
                assert process.poll() is None
            yield process
        finally:
            process.kill()


class Bytes:
    """A client that connects and sends any bytes."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(str(path))
        self._frames: Frames[FromEngine] = Frames(FromEngine)
        self._messages: list[FromEngine] = []

    def __enter__(self) -> Bytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.socket.sendall(message if isinstance(message, bytes) else frame_of(message))

    def receive(self) -> FromEngine | None:
        """The next message; None at the end of the connection.

        Heartbeats are passed over: they come between any two messages, after seconds that a busy machine may take.
        """
        while not self._messages:
            if not (data := self.socket.recv(2**16)):
                return None
            self._messages += (message for message in self._frames.feed(data) if not isinstance(message, Beat))
        return self._messages.pop(0)

    def greet(self) -> None:
        self.send(Hello(client="a test"))
        assert isinstance(self.receive(), Welcome)
        assert isinstance(self.receive(), Ready)

    def problem(self) -> str:
        """What the engine process says last, before it closes the connection."""
        last = None
        while (message := self.receive()) is not None:
            last = message
        assert isinstance(last, Problem)
        return last.message
