"""The client's end of a socket, and the thread that reads it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from compiled_llm.client.errors import EngineDeadError, EngineProcessError
from compiled_llm.client.transport.send_queue import SendQueue
from compiled_llm.protocol.frames import FrameError, Frames, frame_of
from compiled_llm.protocol.messages import VERSION, FromEngine, Hello, Problem, Submit, Welcome

_AT_ONCE = 2**18  # bytes that are read together
_PATIENCE = 30
"""Seconds in which an engine process answers the first message, however busy it is, and reads something later."""

Handle = Callable[[Iterable[FromEngine]], None]  # takes messages, those that have come together
Lose = Callable[[EngineDeadError], None]  # is told at the end why nothing more comes


class Line(Protocol):
    """A way for messages to an engine process and back: a connection, or one to several replicas."""

    def start(self, handle: Handle, lost: Lose) -> None:
        """Have what comes handled from now on."""

    def send(self, message: Struct) -> None:
        """Send a message, without waiting."""

    def check_may_wait(self) -> None:
        """Raise RuntimeError if nothing would come while this thread waits."""

    def close(self) -> None:
        """End it, and with it the requests of the client."""


class ThreadConnection:
    """A connection whose messages are handled in a thread of its own; ``welcome`` is the first of them."""

    def __init__(self, path: str | Path) -> None:
        """Connect, and say hello; EngineDeadError without an engine process, EngineProcessError if it refuses."""
        self.path = Path(path).expanduser()
        self._frames: Frames[FromEngine] = Frames(FromEngine)
        self._socket = _connected(self.path)
        self._send_queue = SendQueue(self._socket)
        self._early: list[FromEngine] = []
        try:
            self._socket.settimeout(_PATIENCE)
            self.send(Hello(client=f"process {os.getpid()}"))
            self.welcome = self._welcome()
            self._socket.settimeout(None)
        except BaseException:
            self._socket.close()
            raise

    def _welcome(self) -> Welcome:
        while not self._early:
            try:
                self._early = self._read()
            except TimeoutError:
                raise EngineDeadError(f"{self.path}: no answer came within {_PATIENCE} s") from None
        first, *self._early = self._early
        if isinstance(first, Problem):
            raise EngineProcessError(f"the engine process refuses the connection: {first.message}")
        if not isinstance(first, Welcome) or first.version != VERSION:
            raise EngineProcessError(f"{self.path}: the process that listens speaks another protocol than this client")
        return first

    def start(self, handle: Handle, lost: Lose) -> None:
        handle(self._early)  # here: a client that has just connected knows whether the engine process is ready
        threading.Thread(target=self._serve, args=(handle, lost), name="compiled_llm client", daemon=True).start()

    def _serve(self, handle: Handle, lost: Lose) -> None:
        try:
            while True:
                handle(self._read())
        except BaseException as error:  # whatever ends the thread: those that wait for messages hear of it
            lost(loss_of(error))

    def _read(self) -> list[FromEngine]:
        """Wait for messages, one at least; EngineDeadError if none will come."""
        while not (messages := self.receive()):
            pass
        return messages

    def receive(self, flags: int = 0) -> list[FromEngine]:
        """Receive some bytes, with ``flags`` of ``socket.recv``, and return the messages that they complete."""
        try:
            data = self._socket.recv(_AT_ONCE, flags)
            messages = list(self._frames.feed(data))
        except ConnectionError:
            raise self._gone() from None
        except FrameError as error:
            raise EngineDeadError(f"the connection to the engine process at {self.path} broke: {error}") from None
        if not data:
            raise self._gone()
        return messages

    def _gone(self) -> EngineDeadError:
        return EngineDeadError(f"the engine process at {self.path} has gone: its process has ended")

    def send(self, message: Struct) -> None:
        """Send a message without waiting; if the connection has ended, the reader learns why.

        Raises:
            ValueError: it is too long.
            EngineProcessError: it is a request, and the engine process does not take any.
        """
        frame = frame_of(message)
        if isinstance(message, Submit) and self._send_queue.has_stood_still_for(_PATIENCE):
            raise EngineProcessError(
                f"the engine process has read nothing for {_PATIENCE} s: its process is stopped or blocked"
            )
        self._send_queue.put(frame)

    def check_may_wait(self) -> None:
        """Let any thread wait: a thread of its own reads the connection."""

    def close(self) -> None:
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def loss_of(error: BaseException) -> EngineDeadError:
    """Return why nothing more comes after an error, whatever it was."""
    if isinstance(error, EngineDeadError):
        return error
    return EngineDeadError(f"the client has failed: {type(error).__name__}: {error}")


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise EngineDeadError(f"{path}: {_reason(error)}") from None
    return connection


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such socket; start an engine process with `compiled-llm serve MODEL --uds PATH`"
    if isinstance(error, ConnectionRefusedError):
        return "its engine process has gone; start one with `compiled-llm serve MODEL --uds PATH`"
    return f"cannot be connected to: {error.strerror or error}"
