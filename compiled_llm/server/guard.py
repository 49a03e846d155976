"""Checks requests before they are read: host, origin, key, the kind of a body and its length; and logs each."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection
from functools import lru_cache
from ipaddress import ip_address

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compiled_llm.server.http.api_error import ApiError, of_exception, unexpected
from compiled_llm.server.openai.common.api_server import REQUEST_ID
from compiled_llm.server.openai.metrics import ApiServerMetrics
from compiled_llm.server.settings import ApiServerSettings

logger = logging.getLogger("compiled_llm.server")

_FOR_EVERYBODY = ("/", "/health", "/ready")
_POLLED = ("/health", "/ready", "/metrics", "/page/{name}")
"""Asked again and again, by programs and pages that watch the server, and by each page that is opened."""
_ANSWERS_OF_POLLED = (200, 304, 503)
"""That the server is ready, or not yet, or nothing new: neither is worth a line each time."""
_ID = "x-request-id"
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+))(?::\d*)?", re.ASCII)
_KNOWN = 1024  # hosts and clients that were looked at, and need not be again
_LONGEST_HOST = 300  # characters of a name with its port; longer ones are not kept
_Headers = dict[str, str]
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")


class Guard:
    """A guard that lets requests through that may come in, and answers the others."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ApiServerSettings,
        metrics: ApiServerMetrics,
        body_bytes: Callable[[], int],
        keyless: Collection[str] = (),
    ) -> None:
        """Guard an application.

        Args:
            body_bytes: returns how many bytes a body can have.
            keyless: further paths that need no key.
        """
        self._keyless = frozenset((*_FOR_EVERYBODY, *keyless))
        self._app = app
        self._body_bytes = body_bytes
        self._settings = settings
        self._hosts = settings.hosts
        self._keys = [_digest(key) for key in settings.api_keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        entry = _LoggedRequest(scope, send, self._metrics, self._settings.behind_proxy)
        try:
            _check_one_host(scope)
            headers = _first_of_each(scope)
            self._check(scope, headers)
            if scope["method"] not in _WITHOUT_BODY:
                self._check_body(headers)
                receive = self._limited(receive)
            await self._app(scope, receive, entry.send)
        except ApiError as error:
            await error.response()(scope, receive, entry.send)
        except asyncio.CancelledError as error:  # before there was an answer; events tell of it themselves
            if not entry.status:
                await of_exception(error).response()(scope, receive, entry.send)
        except Exception:  # of ours
            logger.exception("compiled_llm: %s has failed", entry.id)
            if not entry.status:
                await unexpected().response()(scope, receive, entry.send)
        finally:
            entry.close()

    # ---- from where

    def _check(self, scope: Scope, headers: _Headers) -> None:
        self._check_host(headers)
        self._check_origin(headers)
        if scope["path"] not in self._keyless:
            self._check_key(scope, headers)

    def _check_host(self, headers: _Headers) -> None:
        host = headers.get("host", "")
        name = _host_name(host) if len(host) <= _LONGEST_HOST else ""
        if "*" not in self._hosts and name not in self._hosts:
            raise ApiError(403, f"Host: {name!r} is not served here; start the server with --allowed-host", code="host")

    def _check_origin(self, headers: _Headers) -> None:
        """A page that a user of this machine visits must not use the server."""
        origin = headers.get("origin")
        if origin is None or origin in self._settings.cors_origins or "*" in self._settings.cors_origins:
            return
        if origin.partition("://")[2] != headers.get("host"):
            raise ApiError(
                403, "Origin: pages of other servers are not served; start the server with --cors-origin", code="origin"
            )

    def _check_key(self, scope: Scope, headers: _Headers) -> None:
        if not self._keys:
            if (client := scope.get("client")) is not None and not _is_loopback(client[0]):
                raise ApiError(403, "without API keys only programs of the server's machine are served", code="no_keys")
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip() if kind.lower() == "bearer" else "")
        if not sum(hmac.compare_digest(given, known) for known in self._keys):  # all of them, in the same time
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    # ---- of the body

    def _check_body(self, headers: _Headers) -> None:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "Content-Type: the body has to be application/json", code="content_type")
        self._check_length(int(length) if (length := headers.get("content-length", "0")).isdecimal() else 0)

    def _limited(self, receive: Receive) -> Receive:
        """Return a ``receive`` that bounds the length of a body, and the time until it has come."""
        seconds, length, more = self._settings.client_seconds, 0, True
        deadline = anyio.current_time() + seconds

        async def limited() -> Message:
            nonlocal length, more
            if not more:
                return await receive()
            message: Message = {}
            with anyio.CancelScope(deadline=deadline):  # asyncio's own takes a task, before Python 3.12
                message = await receive()
            if not message:
                raise ApiError(408, f"the body has not come within {seconds:g} s", code="timeout")
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the body was cut", code="incomplete_body")
            length, more = length + len(message.get("body", b"")), message.get("more_body", False)
            self._check_length(length)
            return message

        return limited

    def _check_length(self, length: int) -> None:
        most = self._body_bytes()
        if length > most:
            raise ApiError(413, f"the body can have {most:,} bytes (--max-body-bytes)", code="body_too_long")


class _LoggedRequest:
    """One request in the log and in the metrics; the response has its id."""

    def __init__(self, scope: Scope, send: Send, metrics: ApiServerMetrics, behind_proxy: bool) -> None:
        named = _first_of_each(scope).get(_ID) if behind_proxy else None
        self.id = scope[REQUEST_ID] = named or f"req-{secrets.token_hex(6)}"  # short, since people read it
        self._tells = named is None
        self._scope = scope
        self._send = send
        self._metrics = metrics
        self.status = 0
        self._came = time.monotonic()
        metrics.open.inc()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._tells:
                message["headers"] = [*message.get("headers", ()), (_ID.encode(), self.id.encode())]
        await self._send(message)

    def close(self) -> None:
        seconds, route = time.monotonic() - self._came, self._scope.get("route")
        path = getattr(route, "path", "other")  # as declared: paths that a client makes up are not counted apart
        self._metrics.open.dec()
        self._metrics.count(path, self.status, seconds)
        level = logging.DEBUG if path in _POLLED and self.status in _ANSWERS_OF_POLLED else logging.INFO
        names = ("id", "method", "path", "status", "seconds")
        values = (self.id, self._scope["method"], path, self.status, round(seconds, 6))
        request = {"request": dict(zip(names, values, strict=True))}
        logger.log(level, "compiled_llm: %s %s %s %s %.3f s", *values, extra=request)


def _check_one_host(scope: Scope) -> None:
    """Check that there are not two hosts: a proxy before this server may go by the other one (RFC 9112, 3.2)."""
    if sum(name == b"host" for name, _ in scope["headers"]) > 1:
        raise ApiError(400, "Host: there are several; send one", code="host")


def _first_of_each(scope: Scope) -> _Headers:
    """Return the headers by name; of several with one name, the first."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


@lru_cache(_KNOWN)
def _is_loopback(address: str) -> bool:
    """Whether a client is on this machine; without keys, others are refused: a proxy may listen where they can."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


@lru_cache(_KNOWN)
def _host_name(host: str) -> str:
    """Return the name in a ``Host`` header, without the port; empty if it is malformed."""
    found = _HOST.fullmatch(host)
    return "" if found is None else (found[1] or found[2]).lower()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()
