"""A server of OpenAI's API, asked with the standard library alone: `compiled-llm serve`, vLLM, or another one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from compiled_llm.commands.remote.answer import AnswerFigures
from compiled_llm.execution.reporting.progress import ProgressDisplay

_LOOK = 0.5  # seconds between two looks whether it is ready
_PATIENCE = 600.0  # seconds in which something of an answer has to come

Prompt = str | list[int] | Sequence[dict[str, Any]]


class HttpApi:
    """A server's API; each request has a connection of its own."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """Take a URL with or without ``/v1``; ValueError if it is none of a server."""
        parts = urlsplit(url)
        try:
            self._port = parts.port
        except ValueError as error:
            raise ValueError(f"--server {url}: {error}") from error
        if not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"--server {url}: give a URL such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._host = parts.hostname
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", "User-Agent": "compiled-llm"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def wait_until_ready(self, quiet: bool) -> str:
        """Wait until the server answers, and return the name of its model; RuntimeError if it cannot be reached."""
        if (doing := self._doing()) is not None:
            with ProgressDisplay(not quiet).task(f"the server is not ready: {doing}") as now:
                while (doing := self._doing()) is not None:
                    now(f"the server is not ready: {doing}")
                    time.sleep(_LOOK)
        response = self._requested("GET", "/v1/models")
        with response:
            models = json.loads(response.read())["data"]
        return str(models[0]["id"])

    def submit(self, model: str, prompt: Prompt, given: dict[str, Any], ids: bool = False) -> HttpAnswer:
        """Begin to answer a text, token ids, or messages; ValueError if the server refuses it, else RuntimeError."""
        chat = not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], int)
        path, field = ("/v1/chat/completions", "messages") if chat else ("/v1/completions", "prompt")
        body = {"model": model, field: prompt, "stream": True, "stream_options": {"include_usage": True}}
        asked = {"return_token_ids": True} if ids else {}
        start = time.perf_counter()
        return HttpAnswer(self._requested("POST", path, {**body, **given, **asked}), start)

    def _doing(self) -> str | None:
        """Return the work of a server that is not ready; None if it is, or does not say."""
        response = self._response("GET", "/ready")
        with response:
            content = response.read()
        if response.status != 503:
            return None
        try:
            return str(json.loads(content)["doing"])
        except (ValueError, LookupError, TypeError):
            return "it does not say why"

    def _requested(self, method: str, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        response = self._response(method, path, body)
        if response.status == 200:
            return response
        with response:
            said = _error_in(response.read()) or f"status {response.status} {response.reason}"
        if response.status in (401, 403):
            said += "; give --api-key-file, or set COMPILED_LLM_API_KEY"
        raise (ValueError if response.status in (400, 404, 422) else RuntimeError)(f"the server says: {said}")

    def _response(self, method: str, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        connection = self._kind(self._host, self._port, timeout=_PATIENCE)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._base + path, content, {**self._headers, "Connection": "close"})
            return connection.getresponse()
        except (OSError, HTTPException) as error:
            connection.close()
            why = getattr(error, "strerror", None) or error
            raise RuntimeError(
                f"--server {self.url}: cannot be reached: {why}; start one with `compiled-llm serve MODEL`"
            ) from error


class HttpAnswer:
    """An answer that comes as events; it is read once, as ``text`` or by its tokens."""

    def __init__(self, response: HTTPResponse, start: float) -> None:
        """``start``: when it was asked, by ``time.perf_counter``."""
        self._response = response
        self._start = self._last = start
        self._first: float | None = None
        self._reason = "cancelled"
        self._usage: dict[str, Any] = {}
        self._pieces = 0

    def text(self) -> Iterator[str]:
        """Yield its text, piece by piece, without the thinking before it, which is no part of a chat."""
        for choice in self._choices():
            if piece := choice.get("text") or (choice.get("delta") or {}).get("content"):
                yield piece

    def __iter__(self) -> Iterator[int]:
        for choice in self._choices():
            if "token_ids" not in choice:
                raise RuntimeError("the server sends no token ids; leave --ids out")
            yield from choice["token_ids"] or ()

    def cancel(self) -> None:
        """Close the connection, so that the server stops the answer."""
        self._response.close()

    def figures(self) -> AnswerFigures:
        cached = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return AnswerFigures(
            int(self._usage.get("completion_tokens") or self._pieces),
            self._last - self._start,
            None if self._first is None else self._first - self._start,
            self._reason,
            self._usage.get("prompt_tokens"),
            cached,
        )

    def _choices(self) -> Iterator[dict[str, Any]]:
        for event in self._events():
            self._last = time.perf_counter()
            self._usage = event.get("usage") or self._usage
            for choice in event.get("choices") or ():
                if self._first is None and (choice.get("text") or (choice.get("delta") or {}).get("content")):
                    self._first = self._last
                self._pieces += 1
                self._reason = choice.get("finish_reason") or self._reason
                yield choice

    def _events(self) -> Iterator[dict[str, Any]]:
        try:
            for line in self._response:
                if not line.startswith(b"data:"):
                    continue
                content = line.removeprefix(b"data:").strip()
                if content == b"[DONE]":
                    return
                if (said := _error_in(content)) is not None:
                    raise RuntimeError(f"the server says: {said}")
                yield json.loads(content)
        except (OSError, HTTPException, ValueError, AttributeError) as error:  # the last if it was closed meanwhile
            raise RuntimeError(f"the server has ended the answer: {error}") from error
        raise RuntimeError("the server has ended the answer before its end")


def _error_in(content: bytes) -> str | None:
    """Return the message of an error in JSON; None if it is none."""
    try:
        said = json.loads(content)
        error = said.get("error", said.get("detail"))
        return str(error["message"] if isinstance(error, dict) else error) if error else None
    except (ValueError, LookupError, AttributeError):
        return None
