"""The one API server of a server, in the process that was started."""

from __future__ import annotations

import gc
import logging
import socket
from pathlib import Path

from compiled_llm.server.http_server import HttpServer
from compiled_llm.server.settings import ApiServerSettings

logger = logging.getLogger("compiled_llm.server")


class ApiServerHere:
    """Answers HTTP in this process."""

    def __init__(self, settings: ApiServerSettings, path: Path, listening: socket.socket) -> None:
        """Serve nobody yet.

        Args:
            settings: of the API server.
            path: of the engine process's socket.
            listening: where clients connect.
        """
        self._server = HttpServer(settings, path, self._changed)
        self._listening = listening

    @property
    def was_ready(self) -> bool:
        """Whether it could ask the engine process, once."""
        return self._server.api_server.link.was_ready

    @property
    def at_once(self) -> bool:
        """Whether nobody is to be waited for any more."""
        return self._server.force_exit

    async def run(self) -> str | None:
        """Serve until SIGTERM, Ctrl-C or ``end``; return why it has ended, if nobody has told it to."""
        await self._server.serve(sockets=[self._listening])
        return self._server.why

    def end(self) -> None:
        """Take no more requests, and let those that run end."""
        self._server.should_exit = True

    def _changed(self, has_model: bool) -> None:
        if not has_model:
            return
        if not self.was_ready:
            freeze()
        logger.info("compiled_llm: ready")


def freeze() -> None:
    """Let the garbage collector look no more at what is imported and loaded: all streams would wait meanwhile."""
    gc.collect()
    gc.freeze()
