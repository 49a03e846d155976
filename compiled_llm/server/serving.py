"""Serves HTTP until it is told to end, with an engine process in a process of its own."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
from dataclasses import replace
from types import FrameType
from typing import Protocol

from compiled_llm.server.engine_process.starter import EngineProcess
from compiled_llm.server.settings import ApiServerSettings

logger = logging.getLogger("compiled_llm.server")

SIGNALS = (signal.SIGTERM, signal.SIGINT)  # the first lets requests end, the second ends them
_QUEUE = 2048  # connections that wait to be accepted, at most
_OTHER_FILES = 100  # open files of an API server that are no connections


class Serving(Protocol):
    """A server of HTTP: an API server in this process, or several in their own."""

    @property
    def was_ready(self) -> bool:
        """Whether it could ask the engine process, once."""
        ...

    @property
    def at_once(self) -> bool:
        """Whether requests are not waited for any more."""
        ...

    async def answer(self) -> str | None:
        """Serve until a signal or ``end``; return why it has ended, if neither has come."""
        ...

    def end(self) -> None:
        """Take no more requests, and let those that run end."""
        ...


def listen(settings: ApiServerSettings) -> socket.socket:
    """Return a socket that listens where the server is to; RuntimeError if it cannot."""
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


def with_room(settings: ApiServerSettings) -> ApiServerSettings:
    """Raise this process's limit of open files, and that of its children, or else allow fewer connections."""
    needed, (now, most) = settings.max_connections + _OTHER_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY or now >= needed:
        return settings
    files = needed if most == resource.RLIM_INFINITY else min(needed, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    if files < needed:
        fewer = max(1, files - _OTHER_FILES)
        logger.warning("compiled_llm: at most %d connections: this process may open %d files (ulimit -Hn)", fewer, most)
        return replace(settings, max_connections=fewer)
    return settings


async def serve(serving: Serving, engine_process: EngineProcess) -> str | None:
    """Serve until SIGTERM or Ctrl-C, the second of which ends requests; return why it has ended if not told to."""
    for number in SIGNALS:
        signal.signal(number, _passed_over)  # the engine process still runs when the last answer has gone out
    answering = asyncio.create_task(serving.answer())
    running = asyncio.create_task(engine_process.run(lambda: serving.was_ready))
    try:
        await asyncio.wait([answering, running], return_when=asyncio.FIRST_COMPLETED)
        serving.end()
        why = await answering
        return running.result() if running.done() else why
    finally:
        running.cancel()
        await _stop(engine_process, at_once=serving.at_once)


async def _stop(engine_process: EngineProcess, at_once: bool) -> None:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, engine_process.kill)
    try:
        await engine_process.stop(at_once)
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, _passed_over)


def _passed_over(sig: int, frame: FrameType | None) -> None:
    pass
