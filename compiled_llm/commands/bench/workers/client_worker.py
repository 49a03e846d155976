"""A client of a server, in a process of its own; see `compiled_llm.commands.bench.serving.clients`.

It imports no torch, and collects no garbage while it measures: what is measured is the server.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from compiled_llm.client import AsyncClient
from compiled_llm.commands.bench.workers.http_client import Answer, HttpClient
from compiled_llm.engine.params import SamplingParams


class Client(Protocol):
    """Asks a server."""

    async def answer(self, prompt: Sequence[int], new: int, temperature: float) -> Answer:
        """Return the answer to a prompt, which is so many tokens long."""
        ...


class SocketClient:
    """Asks a generator at its socket."""

    def __init__(self, path: str) -> None:
        """Connect to nobody yet."""
        self._client = AsyncClient(path)

    async def connect(self) -> SocketClient:
        """Connect to the generator, which is ready."""
        await self._client.connect()
        return self

    async def answer(self, prompt: Sequence[int], new: int, temperature: float) -> Answer:
        """Return the answer to a prompt, which is so many tokens long."""
        params = SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True)
        handle = self._client.submit(prompt, params)
        times = [time.perf_counter() async for _ in handle]
        return Answer(times, len(times), (await handle).cached_tokens)


async def connected(job: dict[str, Any]) -> Client:
    """Return what asks the server that the job names."""
    if "socket" in job:
        return await SocketClient(job["socket"]).connect()
    return HttpClient(job["url"], job["model"])


async def answered(client: Client, asked: dict[str, Any]) -> dict[str, Any]:
    """Send requests when they are to arrive, and return what came when, in seconds from the begin."""
    begin = time.perf_counter()

    async def one(prompt: list[int], new: int, arrival: float) -> Answer:
        await asyncio.sleep(begin + arrival - time.perf_counter())
        return await client.answer(prompt, new, asked["temperature"])

    requests = zip(asked["prompts"], asked["new"], asked["arrivals"], strict=True)
    answers = await asyncio.gather(*(one(*request) for request in requests))
    times = [[when - begin for when in answer.times] for answer in answers]
    cached = [answer.cached for answer in answers if answer.cached is not None]
    return {
        "seconds": max(one[-1] for one in times),
        "lengths": [answer.tokens for answer in answers],
        "counts": {"cached tokens": sum(cached)} if cached else {},
        "times": times,
    }


def main() -> None:
    """Connect to the server that the job names, then answer until stdin ends."""
    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(connected(json.loads(sys.argv[1])))
    gc.collect()
    gc.freeze()
    gc.disable()
    _send({"mark": "loaded"})
    for line in sys.stdin:
        _send(loop.run_until_complete(answered(client, json.loads(line))))
        gc.collect()
    sys.stderr.flush()
    os._exit(0)  # without waiting for servers


def _send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
