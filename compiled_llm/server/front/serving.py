"""Runs a front until it is told to end, and its generator beside it."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from compiled_llm.client import AsyncClient
from compiled_llm.server.front.app import application
from compiled_llm.server.front.front import Front
from compiled_llm.server.front.generator_link import GeneratorLink
from compiled_llm.server.front.generator_process import GeneratorProcess
from compiled_llm.server.front.http_protocol import LimitedHttpTools
from compiled_llm.server.front.settings import FrontSettings

logger = logging.getLogger("compiled_llm.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_KEEP_ALIVE_SECONDS = 30
_QUEUE = 2048
"""Connections that wait to be accepted, at most."""
_OTHER_FILES = 100
"""Open files of a front that are no connections."""


def listen(settings: FrontSettings) -> socket.socket:
    """Return a socket that listens where the front is to.

    Raises:
        RuntimeError: somebody listens there, or there is no such address.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listening = socket.create_server((settings.host, settings.port), family=family, backlog=_QUEUE)
        # Connections have it from here; asyncio would not set it, and a small piece would wait 40 ms for others.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise RuntimeError(
            f"--host {settings.host} --port {settings.port}: cannot listen there: {error.strerror or error}"
        ) from error


def with_room(settings: FrontSettings) -> FrontSettings:
    """Raise the process's limit of open files, often 1,024, to what connections need; have fewer if it ends before."""
    needed, (now, most) = settings.most_connections + _OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY or now >= needed:
        return settings
    files = needed if most == resource.RLIM_INFINITY else min(needed, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    if files < needed:
        fewer = max(1, files - _OTHER_FILES)
        logger.warning("compiled_llm: at most %d connections: this process may open %d files (ulimit -Hn)", fewer, most)
        return replace(settings, most_connections=fewer)
    return settings


async def serve(
    settings: FrontSettings, path: Path, listening: socket.socket, generator: GeneratorProcess | None
) -> str | None:
    """Serve until SIGTERM or Ctrl-C; requests may end then, the second signal ends them.

    Args:
        settings: of the front.
        path: of the generator's socket.
        listening: where it listens.
        generator: to be run beside it; None for one that somebody else runs.

    Returns:
        Why it has ended, if nobody has told it to.
    """
    server, front = server_of(settings, path, _freeze)
    for number in _SIGNALS:
        signal.signal(number, _passed_over)  # uvicorn raises it again at the end, when the generator still runs
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    if generator is None:
        await serving
        return None
    running = asyncio.create_task(generator.run(lambda: front.link.was_ready))
    try:
        await asyncio.wait([serving, running], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        return running.result() if running.done() else None
    finally:
        running.cancel()
        await _stop(generator, at_once=server.force_exit)


async def _stop(generator: GeneratorProcess, at_once: bool) -> None:
    """End a generator; a signal that comes while it takes long ends it by force."""
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, generator.kill)
    try:
        await generator.stop(at_once)
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, _passed_over)


def _freeze() -> None:
    """Let the garbage collector look no more at what is imported and loaded: all streams would wait meanwhile."""
    gc.collect()
    gc.freeze()


def server_of(
    settings: FrontSettings, path: Path, loaded: Callable[[], object] = lambda: None
) -> tuple[uvicorn.Server, Front]:
    """Return a server, and what it answers with.

    Args:
        settings: of the front.
        path: of the generator's socket.
        loaded: called once all is there that stays.
    """
    app = application(settings, GeneratorLink(lambda tokenizer: AsyncClient(path, tokenizer=tokenizer), loaded))
    protocol: Any = partial(
        LimitedHttpTools, client_seconds=settings.client_seconds, most_connections=settings.most_connections
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
    return _Server(config), app.state.front


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let requests end at the first signal, and end them at the second, whichever it is."""
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the application end, too, when requests are ended: uvicorn would drop it, with a traceback."""
        if (left := len(self.server_state.tasks)) and not self.force_exit:
            logger.info("compiled_llm: requests that may end first: %d; a second signal ends them", left)
        await super().shutdown(sockets)
        if self.force_exit:
            await self.lifespan.shutdown()


def _passed_over(sig: int, frame: FrameType | None) -> None:
    pass
