"""The clock of an API server's event loop, which a test puts forward: no test waits for time, or has to be in time."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable

from support.server.engine_processes import PATIENCE, until
from support.server.running_servers import RunningServer

_A_WHILE = 5.0


class Clock:
    """What an API server waits for some seconds for comes once so many were added, however long that takes."""

    def __init__(self, api_server: RunningServer) -> None:
        self._loop = api_server.loop
        self._ahead, time = 0.0, self._loop.time
        self._loop.time = lambda: time() + self._ahead  # type: ignore[method-assign]

    def add(self, seconds: float = _A_WHILE) -> None:
        """Put the clock forward, and return once the event loop has done what was due then."""

        async def adding() -> None:
            self._ahead += seconds
            for _ in range(5):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(adding(), self._loop).result(PATIENCE)

    def until(self, condition: Callable[[], object]) -> None:
        """Add time, a while after the other, until something has happened."""

        def has_happened() -> object:
            self.add()
            return condition()

        until(has_happened)

    def rest(self, peer: socket.socket) -> bytes:
        """What a connection receives until it is closed, as time passes."""
        received = b""

        def is_closed() -> bool:
            nonlocal received
            while select.select([peer], [], [], 0)[0]:
                if not (data := peer.recv(2**16)):
                    return True
                received += data
            return False

        self.until(is_closed)
        return received
