"""A client that reads in the front's event loop: a thread would have to be woken for each token, and then the loop."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

from compiled_llm.client import AsyncClient
from compiled_llm.client.connection import Connection, Handle, Line, Lose, loss_of


class LoopClient(AsyncClient):
    """Reads what comes in the event loop that connects it; only what never blocks that loop may wait for answers."""

    async def connect(self, wait: bool = True) -> None:
        """As of ``AsyncClient``."""
        self._loop = asyncio.get_running_loop()
        await super().connect(wait)

    def _dial(self) -> Line:
        return LoopConnection(self._path, self._loop)


class LoopConnection(Connection):
    """Has what comes handled in an event loop."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        """Connect, and say hello.

        Args:
            path: of the socket.
            loop: that reads.

        Raises:
            GeneratorLostError: there is no generator.
            GeneratorError: it does not want to talk to this client.
        """
        super().__init__(path)
        self._loop = loop

    def start(self, handle: Handle, lost: Lose) -> None:
        """Have the event loop read from now on.

        Args:
            handle: takes messages, those that have come together.
            lost: is told at the end why nothing more comes.
        """
        self._loop.call_soon_threadsafe(self._begin, handle, lost)

    def _begin(self, handle: Handle, lost: Lose) -> None:
        handle(self._early)
        self._loop.add_reader(self._socket, self._take, handle, lost)

    def _take(self, handle: Handle, lost: Lose) -> None:
        try:
            handle(self.receive(socket.MSG_DONTWAIT))
        except BlockingIOError:  # there was nothing, after all
            pass
        except Exception as error:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            lost(loss_of(error))

    def close(self) -> None:
        """End the connection; the loop finds the end, and closes the socket, which it must not find closed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
