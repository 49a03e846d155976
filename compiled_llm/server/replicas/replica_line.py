"""A client's line to replicas: each request is a call of its own, which a router sends to one of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import suppress
from contextvars import Context
from typing import Any, Protocol

from msgspec import Struct

from compiled_llm.client.errors import EngineBusyError, EngineDeadError, EngineProcessError
from compiled_llm.client.transport.loop_connection import check_may_wait, loop_closed
from compiled_llm.protocol.frames import Frames
from compiled_llm.protocol.messages import Cancel, FromEngine, Preparing, Ready, Refused, Submit

logger = logging.getLogger("compiled_llm.server")

_LOOKING = 1.0  # seconds between two looks whether a replica is there
_AGAIN = 0.1  # seconds until another is asked, if one has ended
PATIENCE = 10.0  # seconds in which a replica has to answer that it is there; a busy one may take some


class Replicas(Protocol):
    """Several engine processes behind a router."""

    async def ready(self) -> Ready:
        """Return the facts of one of them; EngineProcessError if it has ended."""
        ...

    def answer(self, submit: Submit) -> AsyncIterator[bytes]:
        """Yield the messages about a request, in frames of the protocol; to leave the loop ends the request.

        Raises:
            EngineDeadError: the one that has answered has ended.
            EngineBusyError: all have as many requests as they take.
        """
        ...


class ReplicaLine:
    """A line of messages to replicas and back, in an event loop; any thread may ``start``, ``send`` and ``close``."""

    def __init__(self, replicas: Replicas, loop: asyncio.AbstractEventLoop, patience: float = PATIENCE) -> None:
        """``patience``: seconds after which the replicas are lost, if none answers."""
        self._replicas = replicas
        self._loop = loop
        self._patience = patience
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the requests' numbers; 0 looks for a replica

    def start(self, handle: Callable[[Iterable[FromEngine]], None], lost: Callable[[EngineDeadError], None]) -> None:
        """Look whether replicas are there, and have their messages handled in the event loop."""
        self._handle, self._lost = handle, lost
        self._call(self._begin, 0, self._look)

    def send(self, message: Struct) -> None:
        match message:
            case Submit():
                self._call(self._begin, message.request, self._answer, message)
            case Cancel(request, None):  # API servers never end one of several answers
                self._call(self._cancel, request)

    def check_may_wait(self) -> None:
        check_may_wait(self._loop)

    def close(self) -> None:
        self._call(self._end)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        # In a context of its own: Ray would give all requests of one HTTP request one name, and answer only one.
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments, context=Context())

    # ---- in the event loop

    def _begin(self, number: int, work: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> None:
        self._tasks[number] = task = self._loop.create_task(work(*arguments))
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def _cancel(self, request: int) -> None:
        if (task := self._tasks.pop(request, None)) is not None:
            task.cancel()
            self._handle([Refused(request, "invalid", "the client has left")])

    def _end(self) -> None:
        for task in tuple(self._tasks.values()):
            task.cancel()

    async def _answer(self, submit: Submit) -> None:
        frames: Frames[FromEngine] = Frames(FromEngine)
        try:
            async for data in self._replicas.answer(submit):
                self._handle(frames.feed(data))
        except EngineBusyError as error:
            self._handle([Refused(submit.request, "full", str(error))])
        except EngineProcessError as error:
            self._handle([Refused(submit.request, "unavailable", str(error))])
        except Exception:
            logger.exception("compiled_llm: a request to a replica has failed")
            self._handle([Refused(submit.request, "failed", "an error of the server, which its log has")])

    async def _look(self) -> None:
        """Report the facts of the first replica that answers, and the loss of them all."""
        try:
            await self._look_on()
        except asyncio.CancelledError:  # the loop ends; or the client is closed, which has said so before
            self._lost(loop_closed())
            raise
        except Exception as error:  # whatever it was, requests that wait have to end
            logger.exception("compiled_llm: replicas cannot be asked")
            self._lost(EngineDeadError(f"replicas cannot be asked: {type(error).__name__}"))
        else:
            self._lost(EngineDeadError(f"no replica has answered for {self._patience:g} s"))

    async def _look_on(self) -> None:
        """Report the facts of replicas, until none answers any more."""
        self._handle([Preparing("waiting for a replica")])
        while (ready := await self._found()) is not None:
            self._handle([ready])
            await asyncio.sleep(_LOOKING)

    async def _found(self) -> Ready | None:
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(self._asked(), self._patience)
        return None

    async def _asked(self) -> Ready:
        while True:
            with suppress(EngineProcessError):
                return await self._replicas.ready()
            await asyncio.sleep(_AGAIN)
