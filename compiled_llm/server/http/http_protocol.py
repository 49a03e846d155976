"""HTTP by httptools: half of what h11 costs for each event of a stream. Clients that stall are cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from compiled_llm.server.http.api_error import unavailable

HEAD_BYTES = 64 * 2**10  # of a request: its target, and the names and values of its headers and trailers
_TOO_LONG = "The head of the request is too long."
_LOOKS = 4  # how often a client is looked at in the time that it has


class _HeadWithBody:
    """A transport for one response; it sends the head with the beginning of the body: a write costs as much again."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head: bytes | None = b""

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._transport.write(data)
        elif self._head:
            self._head += data
            self._send_head()
        else:
            self._head = data
            self._loop.call_soon(self._send_head)  # if the body does not follow at once

    def _send_head(self) -> None:
        if self._head:
            head, self._head = self._head, None
            self._transport.write(head)

    def close(self) -> None:
        self._send_head()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class LimitedHttpTools(HttpToolsProtocol):
    """A protocol that closes connections of clients that break its limits, which uvicorn and httptools would keep."""

    # The size of a head is bounded, and so is the time until it has come. So is the time of a body, which the guard
    # waits for; once the guard has refused one, the rest of it is passed over for as long again. A client that takes
    # nothing of an answer for ``client_seconds`` is cut off. Connections beyond a number are refused with a reason:
    # uvicorn's ``limit_concurrency`` counts only those that have sent a head.

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        client_seconds: float,
        max_connections: int,
        when_lost: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._when_lost = when_lost
        self._client_seconds = client_seconds
        self._max_connections = max_connections
        self._looking: asyncio.TimerHandle | None = None
        self._in_head, self._in_body, self._has_body = True, False, False
        self._head_bytes = self._field_bytes = 0
        self._owed_since: float | None = None  # the rest of a request; None between two
        self._unsent = 0
        self._unsent_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            self._refuse()
        else:
            self._owed_since = self.loop.time()
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._looking is not None:
            self._looking.cancel()
        self._when_lost()

    def data_received(self, data: bytes) -> None:
        if self._owed_since is None:
            self._owed_since = self.loop.time()
        self._has_body = False
        super().data_received(data)
        counts = self._in_head or (
            self._in_body and not self._has_body
        )  # trailers, which the parser keeps until they end
        self._head_bytes = self._head_bytes + len(data) if counts else 0
        if self._head_bytes > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(_TOO_LONG)

    def on_message_begin(self) -> None:
        self._in_head, self._owed_since = True, self.loop.time()
        self._field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, count: int) -> None:
        """Count bytes of a head, which may come whole with one read; ValueError stops the parser."""
        self._field_bytes += count
        if self._field_bytes > HEAD_BYTES:
            self.send_400_response(_TOO_LONG)
            raise ValueError(_TOO_LONG)

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong, once, and close the connection."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body, self._owed_since = False, True, self.loop.time()
        super().on_headers_complete()
        cycle: Any = self.cycle
        cycle.transport = _HeadWithBody(self.transport, self.loop)

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body, self._owed_since = False, None
        super().on_message_complete()

    # ---- clients that stall

    def _refuse(self) -> None:
        error = unavailable(f"the server has {self._max_connections:,} connections", "too_many_connections")
        body = msgspec.json.encode(error.body)
        head = (
            f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {error.headers['Retry-After']}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _look_later(self) -> None:
        self._looking = self.loop.call_later(self._client_seconds / _LOOKS, self._look)

    def _look(self) -> None:
        self._look_later()
        if self._takes_nothing():
            self.transport.abort()
        elif self._owes_request() and not self.transport.is_closing():
            if self._in_head and self._head_bytes:
                self.send_400_response("The head of the request has not come in time.")
            else:
                self.transport.close()

    def _takes_nothing(self) -> bool:
        """Whether bytes wait to be sent of which the client has taken none for too long."""
        unsent, now = self.transport.get_write_buffer_size(), self.loop.time()
        if not unsent or unsent != self._unsent:
            self._unsent, self._unsent_since = unsent, now
        return now - self._unsent_since >= self._client_seconds

    def _owes_request(self) -> bool:
        """Whether the rest of a request is overdue; while an earlier one is answered, it may wait."""
        if self._owed_since is None:
            return False
        if self._answers_earlier():
            self._owed_since = self.loop.time()
        return self.loop.time() - self._owed_since >= self._client_seconds * (2 if self._in_body else 1)

    def _answers_earlier(self) -> bool:
        answered: Any = self.cycle  # None before the first request
        return bool(self.pipeline) or (not self._in_body and answered is not None and not answered.response_complete)
