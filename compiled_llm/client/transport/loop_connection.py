"""A connection that an event loop reads: a reading thread would be woken for each step's tokens, and then the loop."""

# Measured instead of ``Client``'s thread, a loop in one takes 9.2 us of CPU a message (5.2), which makes steps of 1 and
# 64 answers 4 to 11 % and requests of one token 7 to 10 % dearer; these by half if calls go through a portal to
# ``AsyncClient``. So there are two readers: a caller without an event loop has a thread that waits in ``recv``.

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from compiled_llm.client.errors import EngineDeadError
from compiled_llm.client.transport.connection import Handle, Lose, ThreadConnection, loss_of
from compiled_llm.requests.listeners import running_loop


class LoopConnection(ThreadConnection):
    """A connection whose messages are handled in an event loop."""

    def __init__(self, path: Path, loop: asyncio.AbstractEventLoop, busy_poll: float = 0.0) -> None:
        """``busy_poll``: seconds for which the loop does not sleep after each message, sent or received."""
        self._loop = loop
        self._busy_poll = busy_poll
        self._awake_until = 0.0
        self._is_awake = False
        super().__init__(path)  # says hello: all of the above is needed for that
        self._ending: asyncio.Task[None] | None = None  # kept here: an event loop knows its tasks only weakly

    def start(self, handle: Handle, lost: Lose) -> None:
        self._loop.call_soon_threadsafe(self._begin, handle, lost)

    def _begin(self, handle: Handle, lost: Lose) -> None:
        handle(self._early)
        ended: asyncio.Future[EngineDeadError] = self._loop.create_future()
        self._loop.add_reader(self._socket, self._take, handle, ended)
        self._ending = self._loop.create_task(self._end(ended, lost))

    def _take(self, handle: Handle, ended: asyncio.Future[EngineDeadError]) -> None:
        self._stay_awake()
        try:
            handle(self.receive(socket.MSG_DONTWAIT))
        except BlockingIOError:  # there was nothing, after all
            pass
        except Exception as error:
            self._loop.remove_reader(self._socket)
            if not ended.done():
                ended.set_result(loss_of(error))

    def send(self, message: Struct) -> None:
        super().send(message)
        if self._busy_poll:
            with suppress(RuntimeError):  # the loop is closed: no answer is read
                self._loop.call_soon_threadsafe(self._stay_awake)

    def _stay_awake(self) -> None:
        """Keep the loop from sleeping for a while: to wake it may take longer than to read what comes."""
        if not self._busy_poll:
            return
        self._awake_until = self._loop.time() + self._busy_poll
        if not self._is_awake:
            self._poll()

    def _poll(self) -> None:
        """Come again in the loop's next round, so that it only looks for bytes and does not wait for them."""
        self._is_awake = self._loop.time() < self._awake_until
        if self._is_awake:
            self._loop.call_soon(self._poll)

    async def _end(self, ended: asyncio.Future[EngineDeadError], lost: Lose) -> None:
        """Close the socket once the connection has ended, or when the event loop does: it cancels its tasks first."""
        error = loop_closed()
        try:
            error = await ended
        finally:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            lost(error)

    def check_may_wait(self) -> None:
        check_may_wait(self._loop)

    def close(self) -> None:
        """End the connection. The loop finds the end, and closes the socket: it must not find it closed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._loop.is_closed():
            self._socket.close()


def loop_closed() -> EngineDeadError:
    return EngineDeadError("the event loop that has read the connection is closed")


def check_may_wait(loop: asyncio.AbstractEventLoop) -> None:
    """Raise RuntimeError if this thread runs the event loop that reads what it is about to wait for."""
    if running_loop() is loop:
        raise RuntimeError(
            "nothing would come while this thread waits: its event loop reads the connection; await the handle, or use "
            "compiled_llm.client.Client"
        )
