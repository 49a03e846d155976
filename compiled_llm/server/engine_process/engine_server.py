"""Serves the clients of one engine, in an event loop that runs while the engine's own threads do."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from compiled_llm.compat.own_version import OWN_VERSION
from compiled_llm.protocol.messages import (
    VERSION,
    AskText,
    AskTokens,
    Leaving,
    Preparing,
    Ready,
    Refused,
    Submit,
    Uncompiled,
    Welcome,
)
from compiled_llm.server.defaults import MAX_UNSENT
from compiled_llm.server.engine_process.connection import ClientConnection
from compiled_llm.server.engine_process.socket_file import listen, remove

if TYPE_CHECKING:  # import torch
    from compiled_llm.engine.engine import Engine
    from compiled_llm.server.engine_process.stream import Stream

logger = logging.getLogger("compiled_llm.server")

_LOOKING = 0.02  # seconds between two looks whether requests have ended, when the engine process is about to
LAST_WORDS = 2.0  # seconds that clients have to take what is sent at the end
_BEAT_SECONDS = 5.0  # between two times that clients are told that this process runs
_HOW_ANSWERS_RUN: dict[Uncompiled | None, str] = {
    "compiling": "answers run uncompiled, until they are compiled in the background",
    "failed": "answers stay uncompiled: compiling has failed",
    None: "new answers run compiled from now on",
}


class EngineServer:
    """A server of clients in an event loop; any thread may call ``report``, ``open`` and ``wake``."""

    def __init__(self, path: Path, max_unsent: int = MAX_UNSENT) -> None:
        """Listen at ``path``; ValueError without a safe socket, RuntimeError if another process listens there."""
        self.preparing = Preparing("starting")  # what it does before it takes requests
        self.leaving: str | None = None  # why it takes no more; None while it does
        # called in the event loop once the engine's device runs nothing more
        self.when_lost: Callable[[], None] = lambda: None
        self._path = path
        self._listening = listen(path)
        self._max_unsent = max_unsent
        self._engine: Engine | None = None
        self._ready: Ready | None = None
        self._connections: set[ClientConnection] = set()
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = threading.Event()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._beat, name="compiled_llm heartbeat", daemon=True).start()
        self._server = await asyncio.start_unix_server(self._serve, sock=self._listening)

    # ---- from any thread

    def report(self, doing: str, step: int | None = None, steps: int | None = None) -> None:
        """Tell clients what it does before it is ready, or ready again, and which step of how many, if known."""
        self._call(self._tell_preparing, Preparing(doing, step, steps))

    def open(self, engine: Engine, ready: Ready) -> None:
        self._call(self._begin_taking, engine, ready)

    def wake(self) -> None:
        """Send new tokens in this thread; the engine calls this once a step, in the thread that has read them."""
        for connection in tuple(self._connections):
            if connection.streams:
                connection.wake()
        if self._engine is not None and self._engine.lost is not None:
            self._call(self.when_lost)

    def _beat(self) -> None:
        """Tell clients that this process runs, though its other threads compile, capture or compute for minutes."""
        while not self._over.wait(_BEAT_SECONDS):
            for connection in tuple(self._connections):
                connection.beat()
            self._look_how_answers_run()

    def _look_how_answers_run(self) -> None:
        engine, ready = self._engine, self._ready
        if engine is not None and ready is not None and engine.uncompiled != ready.uncompiled:
            self._call(self._tell_how_answers_run, engine.uncompiled)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None, "the engine process has not started"
        with suppress(RuntimeError):  # the loop is closed: there are no clients any more
            self._loop.call_soon_threadsafe(function, *arguments)

    # ---- in the event loop

    @property
    def doing(self) -> str:
        """``"ready"``, or what it does before it takes requests, in words."""
        return self.preparing.doing if self._ready is None else "ready"

    def _tell_preparing(self, preparing: Preparing) -> None:
        self.preparing, self._ready = preparing, None
        self._tell_all(preparing)

    def _begin_taking(self, engine: Engine, ready: Ready) -> None:
        self._engine, self._ready = engine, replace(ready, uncompiled=engine.uncompiled)
        if engine.uncompiled is not None:
            self._log_how_answers_run()
        self._tell_all(self._ready)

    def _tell_how_answers_run(self, uncompiled: Uncompiled | None) -> None:
        if self._ready is not None and self._ready.uncompiled != uncompiled:  # it may sleep by now
            self._ready = replace(self._ready, uncompiled=uncompiled)
            self._log_how_answers_run()
            self._tell_all(self._ready)

    def _log_how_answers_run(self) -> None:
        assert self._ready is not None, "it is told once the engine is ready"
        logger.info("compiled_llm: %s", _HOW_ANSWERS_RUN[self._ready.uncompiled])

    def _tell_all(self, message: Struct) -> None:
        for connection in self._connections:
            if connection.greeted:
                connection.send(message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = ClientConnection(self, reader, writer, self._max_unsent)
        self._connections.add(connection)
        try:
            await connection.serve()
        except asyncio.CancelledError:
            pass  # the process ends; before Python 3.12, asyncio shows a cancelled connection as a fault
        finally:
            self._connections.discard(connection)

    # ---- what connections ask for

    def greeting(self) -> list[Struct]:
        welcome = Welcome(VERSION, f"compiled-llm {OWN_VERSION}", os.getpid())
        leaving = [] if self.leaving is None else [Leaving(self.leaving)]
        return [welcome, self._ready or self.preparing, *leaving]

    def begin(self, submit: Submit, wanted: Callable[[], bool] = lambda: True) -> Stream | Refused:
        if self._engine is None or self._ready is None or self.leaving is not None:
            return Refused(
                submit.request, "unavailable", self.leaving or f"the engine process is not ready ({self.doing})"
            )
        from compiled_llm.server.engine_process.stream import Stream, begun  # with torch, which is there by now

        stream = begun(self._engine, submit, self._ready.max_tokens, wanted)
        if isinstance(stream, Stream):
            stream.handle.when_changed(self.wake)
        return stream

    def stats(self, number: int) -> Struct:
        if self._engine is None:
            return Refused(number, "unavailable", f"the engine process is not ready ({self.doing})")
        from compiled_llm.server.engine_process.facts import stats_of

        return stats_of(self._engine, number, len(self._connections))

    def reply(self, question: AskTokens | AskText) -> Struct:
        if self._engine is None or self._ready is None:
            return Refused(question.number, "unavailable", f"the engine process is not ready ({self.doing})")
        from compiled_llm.server.engine_process.tokenizing import reply_of

        return reply_of(self._engine.tokenizer, question)

    # ---- the end

    def stop_accepting(self, reason: str) -> None:
        """Take no more requests and no more clients, and say so; a successor may listen at the same path."""
        self.leaving = reason
        self._stop_listening()
        self._tell_all(Leaving(reason))

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
        self._listening.close()
        with suppress(OSError, RuntimeError):  # if its folder is gone or locked; the next engine process replaces it
            remove(self._path)

    async def drain(self, seconds: float) -> None:
        """Wait until requests have ended, for so long; then end the rest, and all connections."""
        if not await self._quiet(seconds):
            for connection in self._connections:
                connection.end_all(f"{self.leaving}, and the request has not ended {seconds:g} s later")
            await self._quiet(LAST_WORDS)
        self._over.set()
        for connection in tuple(self._connections):
            connection.close()

    async def _quiet(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(connection.busy for connection in self._connections) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOKING)
        return not any(connection.busy for connection in self._connections)
