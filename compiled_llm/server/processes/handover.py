"""What the server's process and those of its API servers tell each other: words of one byte, some with a connection."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from compiled_llm.server.settings import ApiServerSettings

TAKE = b"t"
"""To an API server, with a connection: answer this client."""
READY, NOT_READY = b"r", b"n"
"""From an API server: whether it can ask the engine process; to an API server: whether all can."""
BEGUN = b"b"
"""From an API server: it takes connections."""
LEFT = b"l"
"""From an API server: a connection has ended."""

CANNOT_SERVE = 78
"""The exit code of an API server that cannot serve, and whose successor could not either (``EX_CONFIG``)."""

Heard = Callable[[bytes, "socket.socket | None"], object]
"""Takes a word, and the connection that has come with it."""

_LENGTH = struct.Struct("!I")
_AT_ONCE = 64
"""Words that are read before others have their turn."""


class Start(NamedTuple):
    """What an API server is told before all else.

    Attributes:
        settings: of the API server.
        path: of the engine process's socket.
        logs: whether it writes a log.
    """

    settings: ApiServerSettings
    path: Path
    logs: bool


def send_start(end: socket.socket, start: Start) -> None:
    """Tell a new process what it is to be; API keys are in it, which no command line may show."""
    data = pickle.dumps(start)
    end.sendall(_LENGTH.pack(len(data)) + data)


def receive_start(end: socket.socket) -> Start:
    """Wait for what the process that has started this one says.

    Raises:
        EOFError: it has gone.
    """
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    start = pickle.loads(_exactly(end, length))
    assert isinstance(start, Start)
    return start


def _exactly(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (piece := end.recv(count - len(data))):
            raise EOFError
        data += piece
    return data


class Channel:
    """One end of a pair of sockets, in an event loop; nobody waits for the other end."""

    def __init__(self, end: socket.socket, heard: Heard, lost: Callable[[], object]) -> None:
        """Read from now on.

        Args:
            end: of the pair.
            heard: takes each word.
            lost: is told once that the other process has gone.
        """
        end.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._end = end
        self._heard = heard
        self._lost = lost
        self._unsent = bytearray()
        self._loop.add_reader(end, self._read)

    def say(self, word: bytes) -> None:
        """Send a word, after those before it."""
        self._unsent += word
        self._flush()

    def give(self, connection: socket.socket) -> bool:
        """Send a connection, unless the other end reads nothing; whether it was sent."""
        if self._unsent or self._end.fileno() < 0:
            return False
        try:
            socket.send_fds(self._end, [TAKE], [connection.fileno()])
        except OSError:  # it is full, or gone
            return False
        return True

    def close(self) -> None:
        """End it; the other process learns of it."""
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()

    def _flush(self) -> None:
        if self._end.fileno() < 0:
            return
        with suppress(BlockingIOError, BrokenPipeError, ConnectionError):  # whoever reads learns that it has gone
            del self._unsent[: self._end.send(self._unsent)]
        if self._unsent:
            self._loop.add_writer(self._end, self._flush)
        else:
            self._loop.remove_writer(self._end)

    def _read(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                word, files, _, _ = socket.recv_fds(self._end, 1, 1)  # alone: a connection belongs to its word
            except BlockingIOError:
                return
            except OSError:
                word, files = b"", []
            if not word:
                self.close()
                self._lost()
                return
            self._heard(word, socket.socket(fileno=files[0]) if files else None)
            if self._end.fileno() < 0:  # closed by whoever has heard it
                return
