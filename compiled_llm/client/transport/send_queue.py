"""A client's messages are sent at once as far as the socket takes them, and the rest by a thread: no sender waits."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from contextlib import suppress

_AT_ONCE = 2**16  # bytes that the thread sends together


class SendQueue:
    """A queue of frames, sent whole and in their order, for any thread and any event loop."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._changing = threading.Lock()
        self._frames: deque[memoryview] = deque()  # that wait; the thread is sending the first
        self._progress = 0.0

    def put(self, frame: bytearray) -> None:
        """Send a frame; if the connection has ended, only its reader learns it."""
        with self._changing:
            if self._frames:
                self._frames.append(memoryview(frame))
            elif (sent := self._sent_at_once(frame)) < len(frame):
                self._progress = time.monotonic()
                self._frames.append(memoryview(frame)[sent:])
                threading.Thread(target=self._send, name="compiled_llm client sends", daemon=True).start()

    def has_stood_still_for(self, seconds: float) -> bool:
        """Whether something waits, and the other side has taken nothing for so long."""
        return bool(self._frames) and time.monotonic() - self._progress >= seconds

    def _sent_at_once(self, frame: bytearray) -> int:
        try:
            return self._socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            return len(frame)

    def _send(self) -> None:
        while True:
            with suppress(OSError):  # once the connection has ended, each frame is dropped so
                self._send_whole(self._frames[0])
            with self._changing:
                self._frames.popleft()
                if not self._frames:
                    return

    def _send_whole(self, frame: memoryview) -> None:
        for begin in range(0, len(frame), _AT_ONCE):
            self._socket.sendall(frame[begin : begin + _AT_ONCE])
            self._progress = time.monotonic()
