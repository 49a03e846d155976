"""A client of OpenAI's API. It reads answers once all of their events are there, so that reading delays none."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx

from compiled_llm.commands.bench.load import Asked, LoadAnswer, answered


class HttpClient:
    """A client that asks the ``model`` of a server."""

    busy = 0.0  # the largest share of a pass in which this process computed; near 1, the client limited the rate

    def __init__(self, url: str, model: str | None, timeout: float) -> None:
        """Ask for the model that the server lists first, unless one is named; raises RuntimeError if it lists none."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._url = url.rstrip("/")
        self._http = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)
        self._loop = asyncio.new_event_loop()
        self.model = model or self._loop.run_until_complete(self._first_model())

    def run(self, asked: Sequence[Asked], concurrency: int | None) -> list[LoadAnswer]:
        """Send requests, and return answers with their times from the begin; raises RuntimeError if one fails."""
        gc.collect()
        gc.disable()  # the server is measured, not this
        spent = time.process_time()
        begin = time.perf_counter()
        try:
            return self._loop.run_until_complete(answered(asked, self._ask, concurrency))
        except httpx.HTTPError as error:
            raise RuntimeError(f"{self._url}: {type(error).__name__} {error}".rstrip()) from error
        finally:
            self.busy = max(self.busy, (time.process_time() - spent) / (time.perf_counter() - begin))
            gc.enable()

    async def _first_model(self) -> str:
        try:
            response = await self._http.get(f"{self._url}/models")
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
            raise RuntimeError(f"{self._url}/models lists no model: {type(error).__name__} {error}") from error

    async def _ask(self, request: Asked) -> LoadAnswer:
        body = {"model": self.model, "prompt": request.prompt, "max_tokens": request.new, "ignore_eos": True}
        body |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", f"{self._url}/completions", json=body) as response:
            lines = [(time.perf_counter(), line) async for line in response.aiter_lines()]
        if response.status_code != 200:
            said = " ".join(line for _, line in lines)[:500]
            raise RuntimeError(f"the server answers with status {response.status_code}: {said}")
        return answer_of(lines)


def answer_of(lines: Sequence[tuple[float, str]]) -> LoadAnswer:
    """Return when events with text came, by the lines of a response; raises RuntimeError if it is no answer."""
    times = []
    usage = None
    for when, line in lines:
        if line.startswith("data:") and line.strip() != "data: [DONE]":
            event: dict[str, Any] = json.loads(line[5:])
            if "error" in event:
                raise RuntimeError(f"the server has answered: {event['error']}")
            usage = event.get("usage") or usage
            if event.get("choices"):
                times.append(when)
    if usage is None or not times:
        raise RuntimeError("the server has not said how many tokens there were: stream_options.include_usage")
    details = usage.get("prompt_tokens_details") or {}
    return LoadAnswer(times, usage["completion_tokens"], details.get("cached_tokens"))
