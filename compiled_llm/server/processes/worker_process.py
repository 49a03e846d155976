"""An API server in a process of its own, as the one that has started it sees it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from compiled_llm.server.own_process import own_command
from compiled_llm.server.processes.handover import BEGUN, LEFT, NOT_READY, READY, Channel, Start, send_start


class ApiServerProcess:
    """Answers the connections that it is given; it ends when its channel does.

    Attributes:
        begun: whether it has ever taken connections.
        takes: whether it takes connections now.
        ready: whether it can ask the engine process now.
        counts: whether the server is only ready if it is: clients may reach it.
        connections: how many it has.
    """

    def __init__(self, start: Start, changed: Callable[[], object], counts: bool) -> None:
        """Start nothing yet.

        Args:
            start: what it is told.
            changed: called when it has begun, has become ready or not, or has gone.
            counts: whether it is waited for before the server is ready.
        """
        self.begun = self.takes = self.ready = False
        self.counts = counts
        self.connections = 0
        self._start = start
        self._changed = changed
        self._told_ready = False
        self._early: int | None = None  # a signal before there was a process
        self._channel: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        return self._process.pid

    async def run(self) -> int:
        """Start it, and wait for its end; return its exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *own_command("api-server"),
                stdin=theirs.fileno(),
                start_new_session=True,  # Ctrl-C is for the server, which tells it
                env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(self._start.settings.figures)},
            )
        if self._early is not None:
            self.signal(self._early)
        with suppress(OSError):  # it has ended already
            send_start(ours, self._start)
        self._channel = Channel(ours, self._heard, self._lost)
        code = await self._process.wait()
        self._channel.close()
        self._lost()
        return code

    def _heard(self, word: bytes, connection: socket.socket | None) -> None:
        if word == LEFT:
            self.connections -= 1
            return
        if word == BEGUN:
            self.begun = self.takes = True
        else:
            self.ready = word == READY
            self.counts |= self.ready
        self._changed()

    def _lost(self) -> None:
        self.takes = self.ready = self.counts = False
        self.connections = 0
        self._changed()

    def give(self, connection: socket.socket) -> bool:
        """Have it answer a client; whether it will."""
        given = self._channel is not None and self._channel.give(connection)
        self.connections += given
        self.counts |= given
        return given

    def tell(self, all_ready: bool) -> None:
        """Tell it whether all API servers are ready."""
        if self._channel is not None and self._told_ready != all_ready:
            self._told_ready = all_ready
            self._channel.say(READY if all_ready else NOT_READY)

    def signal(self, number: int) -> None:
        """Send it a signal, if it lives, or as soon as it does."""
        if self._process is None:
            self._early = number
        elif self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
