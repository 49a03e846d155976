"""An API server in a process of its own, as the one that has started it sees it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from prometheus_client.multiprocess import mark_process_dead

from compiled_llm.server.own_process import own_command
from compiled_llm.server.processes.handover import BEGUN, LEFT, NOT_READY, READY, TAKE, Start, send_start


class ApiServerProcess:
    """A process that answers the connections that it is given; it ends when nothing can give it one any more."""

    # ``counts``: the server is only ready if this process is, since clients may reach it.

    def __init__(self, start: Start, changed: Callable[[], object], counts: bool) -> None:
        self.takes = self.ready = False
        self.counts = counts
        self.connections = 0
        self._start = start
        self._changed = changed
        self._told_ready = False
        self._early: int | None = None  # a signal before there was a process
        self._process: asyncio.subprocess.Process | None = None
        self._giving: socket.socket  # once it takes connections
        self._words: asyncio.StreamWriter

    async def run(self) -> int:
        """Start it, and wait for its end; return its exit code."""
        self._giving, given = socket.socketpair()
        figures = str(self._start.settings.figures)
        with given:
            self._process = process = await asyncio.create_subprocess_exec(
                *own_command("api-server"),
                stdin=given.fileno(),
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the server, which tells it
                env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": figures},
            )
        if self._early is not None:
            self.signal(self._early)
        with suppress(OSError):  # it has ended already
            send_start(self._giving, self._start)
        _, self._words = await asyncio.open_unix_connection(sock=self._giving)
        assert process.stdout is not None
        while words := await process.stdout.read(1024):
            for word in words:
                self._heard(bytes([word]))
        self.takes = self.ready = self.counts = False
        self.connections = 0
        self._words.close()
        self._changed()
        code = await process.wait()
        mark_process_dead(process.pid, figures)
        return code

    def _heard(self, word: bytes) -> None:
        if word == LEFT:
            self.connections -= 1
            return
        if word == BEGUN:
            self.takes = True
        else:
            self.ready = word == READY
            self.counts |= self.ready
        self._changed()

    def give(self, connection: socket.socket) -> bool:
        """Have it answer a client; whether it will: not if it reads nothing, or has gone."""
        if not self.takes or self._words.transport.get_write_buffer_size():  # words come before the connections after
            return False
        try:
            socket.send_fds(self._giving, [TAKE], [connection.fileno()])
        except OSError:
            return False
        self.connections += 1
        self.counts = True
        return True

    def tell(self, all_ready: bool) -> None:
        if self.takes and self._told_ready != all_ready:
            self._told_ready = all_ready
            self._words.write(READY if all_ready else NOT_READY)

    def signal(self, number: int) -> None:
        """Send it a signal, if it lives, or as soon as it does."""
        if self._process is None:
            self._early = number
        elif self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
