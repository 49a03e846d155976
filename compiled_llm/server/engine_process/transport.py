"""A client's messages are sent at once, by the thread that has them, as far as the socket takes them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

_NOTHING = memoryview(b"")


class Transport:
    """A transport in the thread that sends: to wake another one takes longer than to write a step's tokens."""

    # Nobody waits: not for the client to read, and not for a thread that is sending, which looks again when it has
    # sent.

    def __init__(
        self, connection: socket.socket, due: Callable[[], Iterable[bytearray]], failed: Callable[[Exception], None]
    ) -> None:
        """``due`` returns frames to send, for one thread at a time; ``failed`` hears its errors in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._due = due
        self._failed = failed
        self._sending = threading.Lock()
        self._wanted = self._over = False
        self.rest = _NOTHING  # bytes that wait for the client to read; frames that are due meanwhile go out together
        self._taken = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether a frame is being sent, or waits; once this says no, all that were due before have been sent."""
        return self._sending.locked() or bool(self.rest)  # in this order: a thread that sends may leave a rest

    def flush(self) -> None:
        self._wanted = True
        while self._wanted and self._sending.acquire(blocking=False):
            try:
                self._wanted = False
                if not (self.rest or self._over):
                    self._send_due()
            finally:
                self._sending.release()

    def flush_soon(self) -> None:
        """Send what is due in the event loop, whichever thread says so."""
        self._call(self.flush)

    def close(self) -> None:
        """Send what is due, and nothing more, in the event loop; what the client does not take at once is dropped."""
        with self._sending:
            if not (self.rest or self._over):
                self._send_due()
            self._over, self.rest = True, _NOTHING
            if self._socket.fileno() >= 0:
                self._loop.remove_writer(self._socket)
                self._socket.close()
        self._taken.set()

    def _send_due(self) -> None:
        try:
            data = b"".join(self._due())
        except Exception as error:
            self._fail(error)
            return
        if data and not self._sent(memoryview(data)):
            self._call(self._await_room)

    def _sent(self, data: memoryview) -> bool:
        """Send as much as the socket takes, and keep the rest; return whether there is none."""
        try:
            self.rest = data[self._socket.send(data) :]
        except BlockingIOError:
            self.rest = data
        except OSError as error:
            self._fail(error)
        return not self.rest

    def _fail(self, error: Exception) -> None:
        self._over, self.rest = True, _NOTHING
        self._call(self._failed, error)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    # ---- in the event loop

    async def taken(self) -> None:
        """Wait until the client has taken what was sent, or takes no more."""
        while self.rest:
            self._await_room()
            await self._taken.wait()

    def _await_room(self) -> None:
        if self.rest:
            self._taken.clear()
            self._loop.add_writer(self._socket, self._send_more)

    def _send_more(self) -> None:
        with self._sending:
            if not self._sent(self.rest):
                return
            self._loop.remove_writer(self._socket)
        self._taken.set()
        self.flush()
