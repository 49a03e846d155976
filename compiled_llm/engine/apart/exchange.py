"""What a process and its worker say to each other: a message, and its answer, over a pair of sockets for each."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from msgspec import Struct

from compiled_llm.engine.apart.unwanted import UnwantedError
from compiled_llm.protocol.frames import Frames, frame_of

NEXT = b"n"
"""To the worker, with one end of a pair of sockets: a message waits there, and its answer goes back there."""
_AT_ONCE = 2**20


class Failed(Struct, tag="failed", frozen=True):
    """A task that has no other answer."""

    # ``"invalid"``, by the library that does it; ``"limit"`` or ``"crash"``, which would happen again; ``"lost"``, its
    # process was ended by something else
    kind: Literal["invalid", "limit", "crash", "lost"]
    message: str


def received(end: socket.socket, message: object, max_bytes: int, wanted: Callable[[], bool] = lambda: True) -> Any:
    """Wait for one message; None if the other end has gone."""
    # ``wanted`` is called as often as the socket's timeout says; UnwantedError once it is False, FrameError for others'
    # messages.
    frames: Frames[Any] = Frames(message, max_bytes)
    while wanted():
        try:
            data = end.recv(_AT_ONCE)
        except TimeoutError:
            continue
        except ConnectionError:
            return None
        if not data:
            return None
        for found in frames.feed(data):
            return found
    raise UnwantedError


def send(end: socket.socket, message: Struct, max_bytes: int) -> None:
    """Send a message, unless nobody waits for it any more; FrameError if it is too long."""
    with suppress(OSError):
        end.sendall(frame_of(message, max_bytes))
