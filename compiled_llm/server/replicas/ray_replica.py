"""A replica on Ray Serve; its engine has an interpreter for itself: Ray's work for each piece would delay its steps."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from compiled_llm.client.errors import EngineDeadError
from compiled_llm.client.transport.connection import ThreadConnection
from compiled_llm.protocol.messages import Ready, Submit
from compiled_llm.server.engine_process.socket_folder import SocketFolder
from compiled_llm.server.engine_process.starter import EngineProcess
from compiled_llm.server.replicas.ray_figures import ReplicaFigures
from compiled_llm.server.replicas.relay import Relay

logger = logging.getLogger("compiled_llm.server")

_LOOKING = 0.1  # seconds between two looks whether the engine process listens
_COUNTING = 5.0  # seconds between two looks at its figures; Ray hands them on every ten


class Replica:
    """A replica, of which Ray Serve runs several."""

    async def __init__(self, arguments: Sequence[str]) -> None:  # type: ignore[misc]  # Ray awaits it
        """Start an engine process and wait until it is ready; RuntimeError if it has ended: Ray's log says why."""
        self._ends = False
        self._folder = SocketFolder()
        path = self._folder.socket
        self._process = EngineProcess([*arguments, "--uds", str(path), "--leashed"])
        self._running = asyncio.create_task(self._process.run(lambda: False))  # Ray starts another replica
        relay = asyncio.create_task(self._connected(path))
        await asyncio.wait([relay, self._running], return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            relay.cancel()
            raise RuntimeError(f"{self._running.result()}; the log of this replica has why")
        self._relay = relay.result()
        self._ready = await self._relay.ready
        self._counting = asyncio.create_task(self._count(ReplicaFigures()))

    async def _connected(self, path: Path) -> Relay:
        while True:
            try:
                relay = Relay(await asyncio.to_thread(ThreadConnection, path), self._leave)
            except EngineDeadError:
                await asyncio.sleep(_LOOKING)
            else:
                await relay.ready
                return relay

    def _leave(self, error: EngineDeadError) -> None:
        """End the actor with its engine process: it would refuse all requests, and be chosen for its short queue."""
        if not self._ends:
            logger.error("compiled_llm: the replica ends: %s", error)
            self._folder.remove()
            os._exit(1)

    async def _count(self, figures: ReplicaFigures) -> None:
        while True:
            figures.tell(await self._relay.stats())
            await asyncio.sleep(_COUNTING)

    async def ready(self) -> Ready:
        return self._ready

    async def answer(self, submit: Submit) -> AsyncIterator[bytes]:
        """Yield what comes of a request, in frames of the protocol."""
        async for frames in self._relay.answer(submit):
            yield frames

    async def __del__(self) -> None:
        """End the engine process; Ray calls this once requests have ended."""
        self._ends = True
        self._running.cancel()
        self._counting.cancel()
        await self._process.stop()
        self._folder.remove()
