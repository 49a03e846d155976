"""An API server in a process of its own: it answers the connections that the server's process gives it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

from compiled_llm.server.http.http_protocol import LimitedHttpTools
from compiled_llm.server.http_server import HttpServer
from compiled_llm.server.processes.handover import BEGUN, CANNOT_SERVE, LEFT, NOT_READY, READY, Channel, Start
from compiled_llm.server.processes.one_worker import freeze
from compiled_llm.server.serving import SIGNALS

logger = logging.getLogger("compiled_llm.server")


class GivenApiServer(HttpServer):
    """Listens nowhere, and ends with the process that it has its connections from."""

    def __init__(self, start: Start, end: socket.socket) -> None:
        """Serve nobody yet.

        Args:
            start: what it was told.
            end: of the channel to the server's process.
        """
        super().__init__(start.settings, start.path, self._changed)
        self.api_server.all_ready = False
        self._end_of_channel = end
        self._channel: Channel | None = None
        self._taking: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin, and say so."""
        self._channel = Channel(self._end_of_channel, self._heard, self._left_alone)
        await super().startup(sockets=[])
        self._channel.say(BEGUN)

    def _changed(self, has_model: bool) -> None:
        if has_model and not self.api_server.link.was_ready:
            freeze()
        if self._channel is not None:
            self._channel.say(READY if has_model else NOT_READY)

    def _heard(self, word: bytes, connection: socket.socket | None) -> None:
        if connection is None:
            self.api_server.all_ready = word == READY
        elif self.should_exit:
            self._drop(connection)
        else:
            task = asyncio.create_task(self._take(connection))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)

    async def _take(self, connection: socket.socket) -> None:
        """Answer a client."""
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection, ssl=self.config.ssl)
        except Exception as error:  # the client has left, or speaks no TLS
            logger.debug("compiled_llm: a connection has failed: %s", error)
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        connection.close()
        self._left()

    def _protocol(self) -> LimitedHttpTools:
        new: Any = self.config.http_protocol_class
        protocol: LimitedHttpTools = new(self.config, self.server_state, self.lifespan.state)
        protocol.when_lost = self._left
        return protocol

    def _left(self) -> None:
        if self._channel is not None:
            self._channel.say(LEFT)

    def _left_alone(self) -> None:
        """End at once: nobody would tell it to any more, and the engine process has lost its process, too."""
        self.should_exit = self.force_exit = True


def run_given_api_server(start: Start, end: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C, or until the other end of the channel has gone; the second signal ends requests.

    Args:
        start: what this process was told.
        end: of the channel.

    Raises:
        SystemExit: it cannot serve, and another API server could not either (exit code ``CANNOT_SERVE``).
    """
    server = GivenApiServer(start, end)
    for number in SIGNALS:
        signal.signal(number, _passed_over)  # uvicorn raises it again at the end
    with suppress(asyncio.CancelledError):
        asyncio.run(server.serve())
    if server.why is not None:
        logger.error("compiled_llm: %s", server.why)
        sys.exit(CANNOT_SERVE)


def _passed_over(sig: int, frame: FrameType | None) -> None:
    pass
