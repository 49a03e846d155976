"""The server of one API server: uvicorn's, which reads and writes HTTP, and ends as ours do."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from compiled_llm.client import AsyncClient
from compiled_llm.server.app import application
from compiled_llm.server.http.http_protocol import LimitedHttpTools
from compiled_llm.server.openai.common.api_server import ApiServer
from compiled_llm.server.openai.common.engine_link import EngineLink
from compiled_llm.server.settings import ApiServerSettings

logger = logging.getLogger("compiled_llm.server")

_KEEP_ALIVE_SECONDS = 30
_LAST_WORDS = 1.0  # seconds that clients have to take what they are told at the end


class HttpServer(uvicorn.Server):
    """The uvicorn server of an API server; ``changed`` hears whether an engine process can answer requests."""

    def __init__(
        self, settings: ApiServerSettings, path: Path, changed: Callable[[bool], object] = lambda has_model: None
    ) -> None:
        escapes = settings.escapes_special_tokens
        link = EngineLink(lambda tokenizer: AsyncClient(path, tokenizer=tokenizer), changed, self._fail, escapes)
        app = application(settings, link)
        self.why: str | None = None  # it has ended though it was not told to; None if it was
        self.api_server: ApiServer = app.state.api_server
        protocol: Any = partial(
            LimitedHttpTools,
            client_seconds=settings.client_seconds,
            max_connections=settings.max_connections,
            when_lost=self.lost_connection,
        )
        config = uvicorn.Config(
            app,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            timeout_graceful_shutdown=int(settings.drain_seconds),
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            http=protocol,
            lifespan="on",
            ws="none",
            log_config=None,
            access_log=False,  # the guard writes one, with ids
            server_header=False,
            proxy_headers=False,
        )
        super().__init__(config)

    def _fail(self, why: str) -> None:
        self.why = why
        self.should_exit = True

    def lost_connection(self) -> None:
        """Do nothing: a connection has ended."""

    def freeze_once(self) -> None:
        """Have the garbage collector pass over all that is imported and loaded: streams would wait for it."""
        if not self.api_server.link.was_ready:
            gc.collect()
            gc.freeze()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let requests end at the first signal, and end them at the second, whichever it is."""
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests end, tell those that have not ended in time that they will not, and end the application."""
        # Uvicorn cancels those that take too long, but not at a second signal, and waits for none to say so; at a
        # second signal it drops the application, with a traceback.
        if (left := len(self.server_state.tasks)) and not self.force_exit:
            logger.info("compiled_llm: requests that may end first: %d; a second signal ends them", left)
        await super().shutdown(sockets)
        if self.force_exit:
            for request in self.server_state.tasks:
                request.cancel()
            await self.lifespan.shutdown()
        if ending := set(self.server_state.tasks):
            await asyncio.wait(ending, timeout=_LAST_WORDS)


class ListeningServer(HttpServer):
    """The only API server, in the process that was started, which listens itself; see ``Serving``."""

    def __init__(self, settings: ApiServerSettings, path: Path, listening: socket.socket) -> None:
        super().__init__(settings, path, self._changed)
        self._listening = listening

    @property
    def was_ready(self) -> bool:
        return self.api_server.link.was_ready

    @property
    def at_once(self) -> bool:
        return self.force_exit

    async def answer(self) -> str | None:
        await self.serve(sockets=[self._listening])
        return self.why

    def end(self) -> None:
        self.should_exit = True

    def _changed(self, has_model: bool) -> None:
        if has_model:
            self.freeze_once()
            logger.info("compiled_llm: ready")
