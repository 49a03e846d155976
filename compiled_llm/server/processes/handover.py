"""Between the server's process and its API servers: words of one byte, some of which come with a connection."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from compiled_llm.server.settings import ApiServerSettings

TAKE = b"t"  # to an API server, with a connection: answer this client
READY, NOT_READY = b"r", b"n"
"""From an API server: whether it can ask the engine process; to an API server: whether all can."""
BEGUN = b"b"  # from an API server: it takes connections
LEFT = b"l"  # from an API server: a connection has ended

CANNOT_SERVE = 78
"""The exit code of an API server that cannot serve, and whose successor could not either (``EX_CONFIG``)."""


class Start(NamedTuple):
    """The first message to an API server: settings (with API keys, so no arguments), the engine's socket, the log."""

    settings: ApiServerSettings
    path: Path
    log: tuple[str, str] | None


def send_start(end: socket.socket, start: Start) -> None:
    with Connection(end.dup().detach()) as connection:
        connection.send(start)


def receive_start(end: socket.socket) -> Start:
    """Wait for it, and read no byte more; EOFError if the other process has gone."""
    with Connection(end.dup().detach()) as connection:
        start: Start = connection.recv()
    return start
