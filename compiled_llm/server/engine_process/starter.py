"""Starts the engine process for the API server, starts it again, and ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

from compiled_llm.server.engine_process.process import DEVICE_LOST
from compiled_llm.server.own_process import own_command
from compiled_llm.server.restarts import Restarts

logger = logging.getLogger("compiled_llm.server")

_PATIENCE = 15.0  # seconds that it has to end before it is killed; no client waits for answers by then
_LAST_WORDS = 2.0  # seconds that it has if it is to end at once


class EngineProcess:
    """An engine process; one that dies is replaced, unless it was never ready or too many have died lately."""

    # Its standard input is a pipe that only this process holds: however this one ends, the engine process reads its
    # end.

    def __init__(self, arguments: Sequence[str], max_restarts: int = 3) -> None:
        """``arguments``: of ``compiled-llm``, with ``--leashed``; ``max_restarts``: in an hour."""
        self._arguments = own_command(*arguments)
        self._max_restarts = max_restarts
        self._restarts = Restarts(max_restarts)
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, was_ready: Callable[[], bool]) -> str:
        """Keep one running, and return why there is none any more; ``was_ready`` says whether one has ever been."""
        while True:
            self._process = await asyncio.create_subprocess_exec(
                *self._arguments,
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the API server, which ends it once answers have ended
            )
            code = await self._process.wait()
            if not was_ready():
                return f"the engine process has ended before it was ready (exit code {code})"
            if not self._restarts.may():
                return f"the engine process has ended again, after {self._max_restarts} restarts within an hour"
            why = "its device has failed" if code == DEVICE_LOST else f"exit code {code}"
            logger.error("compiled_llm: the engine process has ended (%s), and is started again", why)

    async def stop(self, at_once: bool = False) -> None:
        """End it; by force if it takes long, or soon if it is to end ``at_once``."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), _LAST_WORDS if at_once else _PATIENCE)
            except asyncio.TimeoutError:
                self.kill()
                await process.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
