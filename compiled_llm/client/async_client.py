"""``compiled_llm.client.AsyncClient``: as ``Client``, for an event loop that must not be kept waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from compiled_llm.client.base import BaseClient
from compiled_llm.client.errors import EngineDeadError, EngineProcessError
from compiled_llm.client.plain import Prompt
from compiled_llm.client.tokenizer import Given
from compiled_llm.client.transport.connection import Line
from compiled_llm.client.transport.loop_connection import LoopConnection, loop_closed
from compiled_llm.client.transport.session import ClientSession
from compiled_llm.protocol.messages import Ready, StatsReply
from compiled_llm.requests.listeners import Listeners
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams

T = TypeVar("T")


class AsyncClient(BaseClient):
    """A client of an engine process as ``Client``; whatever waits is awaited. ``submit`` and ``stream`` are the same.

    The event loop that connects it reads what comes, so that no thread has to be woken for that; as long as it runs,
    others may use the client, too. ``submit`` and ``stream`` do not wait to connect again if the engine process was
    lost: ``await client.wait_until_ready()`` does, and so do ``generate`` and ``stats``.

    Examples:
        >>> async with AsyncClient("/run/llm.sock", tokenizer=True) as client:  # doctest: +SKIP
        ...     async for piece in client.stream("Once upon a time"):
        ...         print(piece, end="")
    """

    def __init__(self, path: str | Path, *, tokenizer: Given = None, busy_poll: float = 0.0) -> None:
        """Do not connect yet; ``connect`` does, or ``async with``.

        Args:
            tokenizer: as of ``Client``; a thread loads it.
            busy_poll: seconds, such as 0.01, for which the event loop does not sleep after each message. Where a
                sleeping process is now and then woken late, tokens come more evenly; the loop takes a core meanwhile.
        """
        if isinstance(busy_poll, bool) or not 0 <= busy_poll < float("inf"):
            raise ValueError(f"busy_poll={busy_poll}: give seconds, such as 0.01, or 0 to let the event loop sleep")
        super().__init__(path, tokenizer)
        self._busy_poll = busy_poll
        self._loop: asyncio.AbstractEventLoop | None = None

    async def connect(self, wait: bool = True) -> None:
        """Connect; with ``wait``, wait until the engine process is ready, however long it has to load and compile.

        Raises:
            EngineDeadError: there is no engine process, or it ends before it is ready.
            EngineProcessError: it does not want to talk to this client.
        """
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._connect)
        if wait:
            await self.wait_until_ready()

    async def wait_until_ready(self, timeout: float | None = None) -> Ready:
        """As of ``Client``; then the tokenizer is loaded, too."""
        return await self._wait_until_ready(timeout)

    async def wait_until_lost(self) -> EngineDeadError:
        """Wait until the engine process has gone, or the client was closed, and return why."""
        session = self._session
        await self._until(session.listeners, lambda: session.lost is not None)
        assert session.lost is not None
        return session.lost

    def give_up(self, error: EngineProcessError) -> None:
        """End all requests with an error, in the event loop; an engine process that goes on later ends them, too."""
        self._session.give_up(error)

    async def stats(self, timeout: float | None = 60) -> StatsReply:
        """As of ``Client``."""
        return await self._stats(timeout)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        hidden_states: Sequence[int] | None = None,
        emitted: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """As of ``Client``; if it is cancelled, its requests end."""
        return await self._generate(prompts, params, hidden_states=hidden_states, emitted=emitted)

    async def _wait_until_ready(self, timeout: float | None = None) -> Ready:
        if self._session_to_use().broken:
            self._loop = asyncio.get_running_loop()
        ready = await super()._wait_until_ready(timeout)
        await asyncio.to_thread(lambda: self._decoding)  # it takes seconds to load
        return ready

    async def _rejoin(self) -> None:
        self._session_to_use()
        await super()._rejoin()

    def _dial(self) -> Line:
        assert self._loop is not None, "it was not connected"
        return LoopConnection(self._path, self._loop, self._busy_poll)

    async def _until(self, listeners: Listeners, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        async def waiting() -> None:
            with listeners.listening() as wakeup:
                while not ready():
                    await wakeup.wait()
                    wakeup.is_set = False

        try:
            await asyncio.wait_for(waiting(), timeout)
        except asyncio.TimeoutError:
            return ready()
        return True

    async def _apart(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.to_thread(function, *arguments)

    def _session_to_use(self) -> ClientSession:
        if self._loop is not None and self._loop.is_closed() and self._session.lost is None:
            self._session.connection_lost(loop_closed())  # it may have been closed without an end of its tasks
        return self._session

    async def __aenter__(self) -> AsyncClient:
        """Connect, and wait until the engine process is ready; the client is closed at the end of the block."""
        try:
            await self.connect()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
