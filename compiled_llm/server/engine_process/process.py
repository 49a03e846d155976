"""The life of an engine process: it answers clients, prepares its engine meanwhile, and ends when it is told to."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from compiled_llm.execution.reporting.progress import Watcher
from compiled_llm.protocol.messages import Ready
from compiled_llm.server.engine_process.engine_server import LAST_WORDS, EngineServer

if TYPE_CHECKING:  # imports torch
    from compiled_llm.engine.engine import Engine
    from compiled_llm.server.engine_process.kept_profile import KeptProfile
    from compiled_llm.server.engine_process.operations import Operations

logger = logging.getLogger("compiled_llm.server")

DEVICE_LOST = 75
"""The process's exit code if its device runs nothing more in it: a new one may well run (``EX_TEMPFAIL``)."""

Prepare = Callable[[Watcher], "tuple[Engine, Ready]"]
"""Loads a model and warms an engine up; takes some time, in a thread of its own."""


def run(
    server: EngineServer,
    prepare: Prepare,
    drain_seconds: float = 30.0,
    operations: Operations | None = None,
    profile: KeptProfile | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C, then let requests end for ``drain_seconds``; a second signal ends the process."""
    # If the engine's device is lost, requests end with the reason, and the process with the exit code ``DEVICE_LOST``.
    asyncio.run(_Life(server, prepare, drain_seconds, operations, profile).run())


class _Life:
    def __init__(
        self,
        server: EngineServer,
        prepare: Prepare,
        drain_seconds: float,
        operations: Operations | None,
        profile: KeptProfile | None,
    ) -> None:
        self._server = server
        self._operations = operations
        self._profile = profile
        self._prepare = prepare
        self._drain_seconds = drain_seconds
        self._engine: Engine | None = None
        self._failure: BaseException | None = None
        self._signal: int | None = None
        self._ending = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_end, number)
        self._server.when_lost = self._ending.set
        await self._server.start()
        if self._operations is not None:
            self._operations.start()
        threading.Thread(target=self._prepared, args=(loop,), name="compiled_llm preparation", daemon=True).start()
        saving = None if self._profile is None else asyncio.create_task(self._profile.run())
        await self._ending.wait()
        if saving is not None:
            saving.cancel()
        await self._end()

    def _prepared(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._engine, ready = self._prepare(self._server.report)
        except BaseException as error:
            self._failure = error
            loop.call_soon_threadsafe(self._ending.set)
        else:
            gc.collect()
            gc.freeze()  # modules and compiled code stay; to look through them would stop all requests for a while
            (self._operations or self._server).open(self._engine, ready)

    def _told_to_end(self, number: int) -> None:
        if self._signal is not None or (self._engine is None and self._failure is None):
            self._server.stop_accepting("the engine process was told to end at once")
            os._exit(128 + number)
        self._signal = number
        self._ending.set()

    async def _end(self) -> None:
        if self._engine is not None and self._engine.lost is not None:
            await self._end_lost(str(self._engine.lost))
        if self._failure is not None:
            self._server.stop_accepting(f"the engine process could not be made ready: {self._failure}")
        else:
            self._server.stop_accepting("the engine process was told to end")
        await self._server.drain(self._drain_seconds)
        if self._operations is not None:
            await asyncio.to_thread(self._operations.close)
        if self._profile is not None:
            await asyncio.to_thread(self._profile.save)
        if self._engine is not None:
            self._engine.close()
        if self._failure is not None:
            raise self._failure

    async def _end_lost(self, reason: str) -> None:
        """End the process without freeing anything: that would only fail, or wait for the device."""
        self._server.stop_accepting(reason)
        await self._server.drain(LAST_WORDS)
        logger.error("compiled_llm: the engine process ends with exit code %d: %s", DEVICE_LOST, reason)
        os._exit(DEVICE_LOST)
