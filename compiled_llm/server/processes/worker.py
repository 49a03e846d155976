"""An API server in its own process, which is given its connections."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from compiled_llm.server.http.http_protocol import LimitedHttpTools
from compiled_llm.server.http_server import HttpServer
from compiled_llm.server.processes.handover import BEGUN, CANNOT_SERVE, LEFT, NOT_READY, READY, Start
from compiled_llm.server.serving import SIGNALS

logger = logging.getLogger("compiled_llm.server")


class GivenApiServer(HttpServer):
    """A server that listens nowhere: it answers the connections that it is given, and ends when nobody gives one."""

    def __init__(self, start: Start, given: socket.socket, words: int) -> None:
        """Connections come over ``given``; ``words`` is a pipe with room for more words than there are connections."""
        super().__init__(start.settings, start.path, self._changed)
        self.api_server.all_ready = False
        given.setblocking(False)
        self._given, self._words = given, words
        self._taking: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().add_reader(self._given, self._read)
        await super().startup(sockets=[])
        self._say(BEGUN)

    def _say(self, word: bytes) -> None:
        with suppress(BrokenPipeError):
            os.write(self._words, word)

    def lost_connection(self) -> None:
        self._say(LEFT)

    def _changed(self, has_model: bool) -> None:
        if has_model:
            self.freeze_once()
        self._say(READY if has_model else NOT_READY)

    def _read(self) -> None:
        try:
            word, files, _, _ = socket.recv_fds(self._given, 1, 1)  # alone: a connection belongs to its word
        except BlockingIOError:
            return
        except OSError:
            word, files = b"", []
        if files:
            task = asyncio.create_task(self._take(socket.socket(fileno=files[0])))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)
        elif word:
            self.api_server.all_ready = word == READY
        else:  # the server's process has gone, so that nothing would end this one
            asyncio.get_running_loop().remove_reader(self._given)
            self.should_exit = self.force_exit = True

    async def _take(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            if self.should_exit:
                raise ConnectionAbortedError("the server ends")
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection, ssl=self.config.ssl)
        except Exception as error:  # the client has left, or speaks no TLS
            logger.debug("compiled_llm: a connection has failed: %s", error)
            connection.close()
            self.lost_connection()

    def _protocol(self) -> LimitedHttpTools:
        new: Any = self.config.http_protocol_class
        protocol: LimitedHttpTools = new(self.config, self.server_state, self.lifespan.state)
        return protocol


def run_given_api_server(start: Start, given: socket.socket) -> None:
    """Serve connections that come over ``given`` until a signal, or until the server's process has gone."""
    # The second signal ends requests. If another API server could not serve either, the exit code is ``CANNOT_SERVE``.
    words = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints is no word
    server = GivenApiServer(start, given, words)
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # uvicorn raises it again at the end
    with suppress(asyncio.CancelledError):
        asyncio.run(server.serve())
    if server.why is not None:
        logger.error("compiled_llm: %s", server.why)
        sys.exit(CANNOT_SERVE)
