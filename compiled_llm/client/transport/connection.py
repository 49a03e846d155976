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

from compiled_llm.client.errors import GeneratorError, GeneratorLostError
from compiled_llm.client.transport.outbox import Outbox
from compiled_llm.protocol.frames import FrameError, Frames, frame_of
from compiled_llm.protocol.messages import VERSION, FromGenerator, Hello, Problem, Submit, Welcome

_AT_ONCE = 2**18
"""Bytes that are read together."""
_PATIENCE = 30
"""Seconds in which a generator, though it may be busy, answers the first message, and reads something later."""

Handle = Callable[[Iterable[FromGenerator]], None]
"""Takes messages, those that have come together."""
Lose = Callable[[GeneratorLostError], None]
"""Is told at the end why nothing more comes."""


class Line(Protocol):
    """What carries a client's messages to a generator, and the generator's back."""

    def start(self, handle: Handle, lost: Lose) -> None:
        """Have what comes handled from now on."""
        ...

    def send(self, message: Struct) -> None:
        """Send a message, without waiting."""
        ...

    def check_may_wait(self) -> None:
        """Check that this thread may wait for what comes.

        Raises:
            RuntimeError: nothing would come meanwhile.
        """
        ...

    def close(self) -> None:
        """End it, and with it the requests of the client."""
        ...


class Connection:
    """Sends messages, and has those that come handled by a thread of its own.

    Attributes:
        path: of the socket.
        welcome: what the generator has said of itself.
    """

    def __init__(self, path: str | Path) -> None:
        """Connect, and say hello.

        Raises:
            GeneratorLostError: there is no generator.
            GeneratorError: it does not want to talk to this client.
        """
        self.path = Path(path).expanduser()
        self._frames: Frames[FromGenerator] = Frames(FromGenerator)
        self._socket = _connected(self.path)
        self._outbox = Outbox(self._socket)
        self._early: list[FromGenerator] = []
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
                raise GeneratorLostError(f"{self.path}: nobody has answered for {_PATIENCE} s") from None
        first, *self._early = self._early
        if isinstance(first, Problem):
            raise GeneratorError(f"the generator refuses the connection: {first.message}")
        if not isinstance(first, Welcome) or first.version != VERSION:
            raise GeneratorError(f"{self.path}: whoever listens speaks another protocol than this client")
        return first

    def start(self, handle: Handle, lost: Lose) -> None:
        """Have a thread read from now on.

        Args:
            handle: takes messages, those that have come together.
            lost: is told at the end why nothing more comes.
        """
        handle(self._early)  # here: whoever has connected finds the generator ready, if it is
        threading.Thread(target=self._serve, args=(handle, lost), name="compiled_llm client", daemon=True).start()

    def _serve(self, handle: Handle, lost: Lose) -> None:
        try:
            while True:
                handle(self._read())
        except BaseException as error:  # whatever ends the thread: those who wait for messages hear of it
            lost(loss_of(error))

    def _read(self) -> list[FromGenerator]:
        """Return the messages that have come, one at least.

        Raises:
            GeneratorLostError: none will.
        """
        while not (messages := self.receive()):
            pass
        return messages

    def receive(self, flags: int = 0) -> list[FromGenerator]:
        """Receive some bytes, and return the messages that they complete.

        Args:
            flags: of ``socket.recv``.

        Raises:
            GeneratorLostError: no more will come.
            OSError: as of ``socket.recv``.
        """
        try:
            data = self._socket.recv(_AT_ONCE, flags)
            messages = list(self._frames.feed(data))
        except ConnectionError:
            raise self._gone() from None
        except FrameError as error:
            raise GeneratorLostError(f"the connection to the generator at {self.path} broke: {error}") from None
        if not data:
            raise self._gone()
        return messages

    def _gone(self) -> GeneratorLostError:
        return GeneratorLostError(f"the generator at {self.path} has gone: its process has ended")

    def send(self, message: Struct) -> None:
        """Send a message without waiting; if that cannot be, the thread that reads learns why.

        Raises:
            ValueError: it is too long.
            GeneratorError: it is a request, and the generator does not take any.
        """
        frame = frame_of(message)
        if isinstance(message, Submit) and self._outbox.has_stood_still_for(_PATIENCE):
            raise GeneratorError(f"the generator has read nothing for {_PATIENCE} s: its process is stopped or blocked")
        self._outbox.put(frame)

    def check_may_wait(self) -> None:
        """Any thread may wait: none of those that do reads the connection."""

    def close(self) -> None:
        """End the connection, and with it the requests of the client."""
        with suppress(OSError):  # it is closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def loss_of(error: BaseException) -> GeneratorLostError:
    """Return why nothing more comes after an error, whatever it was: whoever waits has to hear of it."""
    if isinstance(error, GeneratorLostError):
        return error
    return GeneratorLostError(f"the client has failed: {type(error).__name__}: {error}")


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise GeneratorLostError(f"{path}: {_reason(error)}") from None
    return connection


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such socket; start a generator with `compiled-llm serve MODEL --uds PATH`"
    if isinstance(error, ConnectionRefusedError):
        return "its generator has gone; start one with `compiled-llm serve MODEL --uds PATH`"
    return f"cannot be connected to: {error.strerror or error}"
