"""A client of OpenAI's API that costs next to nothing while it waits: answers are taken apart once all have ended."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from compiled_llm.commands.bench.workers.silence import Silence

Read = tuple[float, bytes]
"""What was read at once, and when."""

_END = b"\r\n0\r\n\r\n"
"""What a body in chunks ends with; nothing in an event does."""


class Answer(NamedTuple):
    """An answer that has come as events.

    Attributes:
        times: when each event with something of the answer came.
        tokens: of the answer, as the server says.
        cached: of the prompt's tokens, those that the server had; None if it does not say.
    """

    times: list[float]
    tokens: int
    cached: int | None


Ask = Callable[[], Awaitable[Callable[[], Answer]]]
"""Asks, and returns what takes the answer apart, which takes milliseconds: others must not be read late for it."""


class HttpClient:
    """Asks one server; connections are kept, and each has one request at a time."""

    def __init__(self, url: str, model: str, silence: Silence) -> None:
        """Connect to nobody yet.

        Args:
            url: up to and with ``/v1``.
            model: how the server calls it.
            silence: is broken by whatever comes.
        """
        self._url = urlsplit(url.rstrip("/"))
        self._model = model
        self._silence = silence
        self._idle: list[_Connection] = []

    async def connect(self, requests: int) -> None:
        """Have a connection for each of so many requests that are sent at once."""
        await asyncio.sleep(0)  # connections learn here that they were closed while the loop did not run
        self._idle = [connection for connection in self._idle if connection.is_open]
        missing = range(requests - len(self._idle))
        self._idle += await asyncio.gather(*(self._connected() for _ in missing))

    def asking(self, prompt: Sequence[int], new: int, temperature: float) -> Ask:
        """Return what asks for so many tokens; it, or what it returns, raises a ``RuntimeError`` if there is none."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": new,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = self._request(json.dumps(body).encode())
        return lambda: self._answer(request)

    async def _answer(self, request: bytes) -> Callable[[], Answer]:
        return partial(answer_of, await self._response_to(request))

    async def _response_to(self, request: bytes) -> list[Read]:
        while self._idle:
            with suppress(_ClosedError):  # meanwhile: servers close connections that nobody uses
                return await self._asked(self._idle.pop(), request)
        return await self._asked(await self._connected(), request)

    async def _asked(self, connection: _Connection, request: bytes) -> list[Read]:
        reads = await connection.ask(request)
        self._idle.append(connection)
        return reads

    def _request(self, body: bytes) -> bytes:
        head = (
            f"POST {self._url.path}/completions HTTP/1.1\r\nHost: {self._url.netloc}\r\nAccept: text/event-stream\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _connected(self) -> _Connection:
        secure = self._url.scheme == "https"
        port = self._url.port or (443 if secure else 80)
        context = ssl.create_default_context() if secure else None
        loop = asyncio.get_running_loop()
        host = self._url.hostname or ""
        _, connection = await loop.create_connection(lambda: _Connection(self._silence), host, port, ssl=context)
        return connection


class _ClosedError(RuntimeError):
    """The server has closed a connection."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(f"the server has closed the connection: {error or 'no error'}")


class _Connection(asyncio.Protocol):
    """Notes what comes, and when."""

    _transport: asyncio.WriteTransport
    _over: asyncio.Future[list[Read]] | None = None

    def __init__(self, silence: Silence) -> None:
        self._silence = silence

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    async def ask(self, request: bytes) -> list[Read]:
        """Send a request, and return what comes, up to the end of the response.

        Raises:
            RuntimeError: the server has closed the connection; a ``_ClosedError`` if it has answered nothing.
        """
        if not self.is_open:
            raise _ClosedError(None)
        self._reads: list[Read] = []
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._over

    def data_received(self, data: bytes) -> None:
        if self._over is not None and not self._over.done():
            self._silence.heard = now = time.perf_counter()
            self._reads.append((now, data))
            if self._has_ended():
                self._over.set_result(self._reads)

    def _has_ended(self) -> bool:
        last = self._reads[-1][1]
        if len(last) < len(_END):
            last = b"".join(data for _, data in self._reads[-len(_END) :])
        return last.endswith(_END) or self._has_all_of_plain_body()

    def _has_all_of_plain_body(self) -> bool:
        """Whether a response that is no stream has come; only errors are."""
        if b"transfer-encoding: chunked" in self._reads[0][1].lower():
            return False
        head, found, body = b"".join(data for _, data in self._reads).partition(b"\r\n\r\n")
        return bool(found) and len(body) >= _length_in(head)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._over is not None and not self._over.done():
            lost = _ClosedError(exc)
            self._over.set_exception(RuntimeError(f"in the midst of an answer, {lost}") if self._reads else lost)


def _length_in(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            return int(value)
    return 0


def answer_of(reads: Sequence[Read]) -> Answer:
    """Take a response apart.

    Raises:
        RuntimeError: it is no stream of an answer.
    """
    times: list[float] = []
    usage: dict[str, Any] | None = None
    for when, event in _events(reads):
        if "error" in event:
            raise RuntimeError(f"the server has answered: {event['error']}")
        usage = event.get("usage") or usage
        if event.get("choices"):
            times.append(when)
    if usage is None:
        raise RuntimeError("the server has not said how many tokens there were: stream_options.include_usage")
    details = usage.get("prompt_tokens_details") or {}
    return Answer(times, usage["completion_tokens"], details.get("cached_tokens"))


def _events(reads: Sequence[Read]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield events, and when the last of each was read.

    Raises:
        RuntimeError: the response is an error.
    """
    when, unread = 0.0, b""
    for when, data in _bodies(reads):
        unread += data
        *whole, unread = unread.split(b"\n\n")
        for event in whole:
            for line in event.splitlines():
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    yield when, json.loads(line[6:])


def _bodies(reads: Sequence[Read]) -> Iterator[Read]:
    """Yield what is in chunks, each with the time when its end was read.

    Raises:
        RuntimeError: the response is an error.
    """
    unread, in_body = b"", False
    for when, data in reads:
        unread += data
        if not in_body:
            head, in_body, rest = _headed(unread)
            if not in_body:
                continue
            unread = rest
            _check_status(head, reads)
        while (chunk := _chunk(unread)) is not None:
            unread = unread[len(chunk.line) + len(chunk.data) + 4 :]
            yield when, chunk.data


def _headed(unread: bytes) -> tuple[bytes, bool, bytes]:
    head, found, rest = unread.partition(b"\r\n\r\n")
    return head, bool(found), rest


class _Chunk(NamedTuple):
    line: bytes
    data: bytes


def _chunk(unread: bytes) -> _Chunk | None:
    """Return the first chunk, if all of it is there."""
    line, found, rest = unread.partition(b"\r\n")
    if not found:
        return None
    length = int(line.partition(b";")[0], 16)
    return _Chunk(line, rest[:length]) if len(rest) >= length + 2 else None


def _check_status(head: bytes, reads: Sequence[Read]) -> None:
    status = head.split(b" ", 2)[1]
    if status != b"200":
        body = b"".join(data for _, data in reads).partition(b"\r\n\r\n")[2]
        raise RuntimeError(f"the server answers with status {status.decode()}: {body[:500].decode(errors='replace')}")
