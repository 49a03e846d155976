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
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from compiled_llm.client import AsyncClient
from compiled_llm.commands.bench.workers.http_client import Answer, Ask, HttpClient
from compiled_llm.commands.bench.workers.silence import Silence
from compiled_llm.requests.sampling_params import SamplingParams


class Client(Protocol):
    """Asks a server."""

    async def connect(self, requests: int) -> None:
        """Be ready for so many requests that are sent at once."""
        ...

    def asking(self, prompt: Sequence[int], new: int, temperature: float) -> Ask:
        """Return what asks for so many tokens; what can be done before is done."""
        ...


class SocketClient:
    """Asks a generator at its socket."""

    def __init__(self, path: str, busy_poll: float, silence: Silence) -> None:
        """Connect to nobody yet; whatever comes breaks the silence."""
        self._client = AsyncClient(path, busy_poll=busy_poll)
        self._silence = silence
        self._is_connected = False

    async def connect(self, requests: int) -> None:
        """Connect to the generator, which is ready; all requests share the connection."""
        if not self._is_connected:
            await self._client.connect()
            self._is_connected = True

    def asking(self, prompt: Sequence[int], new: int, temperature: float) -> Ask:
        """Return what asks for so many tokens."""
        params = SamplingParams(temperature=temperature, max_tokens=new, ignore_eos=True)
        return lambda: self._answer(prompt, params)

    async def _answer(self, prompt: Sequence[int], params: SamplingParams) -> Callable[[], Answer]:
        handle, times = self._client.submit(prompt, params), []
        async for _ in handle:
            self._silence.heard = now = time.perf_counter()
            times.append(now)
        answer = Answer(times, len(times), (await handle).cached_tokens)
        return lambda: answer


def client_of(job: dict[str, Any], silence: Silence) -> Client:
    """Return what asks the server that the job names."""
    if "socket" in job:
        return SocketClient(job["socket"], job["busy_poll"], silence)
    return HttpClient(job["url"], job["model"], silence)


async def answered(client: Client, asked: dict[str, Any], silence: Silence) -> dict[str, Any]:
    """Send requests when they are to arrive, and return what came when, in seconds from the begin."""
    requests = zip(asked["prompts"], asked["new"], strict=True)
    asks = [client.asking(prompt, new, asked["temperature"]) for prompt, new in requests]
    await client.connect(asked["arrivals"].count(0.0))
    begin = time.perf_counter()

    async def one(ask: Ask, arrival: float) -> Callable[[], Answer]:
        await asyncio.sleep(begin + arrival - time.perf_counter())
        return await silence.broken_by(ask())

    ended = await silence.watched(asyncio.gather(*map(one, asks, asked["arrivals"])))
    answers = [take_apart() for take_apart in ended]
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
    job = json.loads(sys.argv[1])
    silence = Silence(job["patience"])
    client = client_of(job, silence)
    loop.run_until_complete(client.connect(0))
    gc.collect()
    gc.freeze()
    gc.disable()
    _send({"mark": "loaded"})
    for line in sys.stdin:
        _send(loop.run_until_complete(answered(client, json.loads(line), silence)))
        gc.collect()
    sys.stderr.flush()
    os._exit(0)  # without waiting for servers


def _send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
