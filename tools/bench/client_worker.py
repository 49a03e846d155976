"""A client of a server at the end of a pipe, as `processes.py` says; it imports no torch: the server is measured."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence

from compiled_llm.client import AsyncClient
from compiled_llm.commands.bench.http_client import HttpClient
from compiled_llm.commands.bench.load import Asked, LoadAnswer, answered
from compiled_llm.requests.sampling_params import SamplingParams


class SocketClient:
    """Asks an engine process at its socket."""

    def __init__(self, path: str, busy_poll: float) -> None:
        self._client = AsyncClient(path, busy_poll=busy_poll)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._client.connect())

    def run(self, asked: Sequence[Asked], concurrency: int | None) -> list[LoadAnswer]:
        return self._loop.run_until_complete(answered(asked, self._ask, concurrency))

    async def _ask(self, request: Asked) -> LoadAnswer:
        params = SamplingParams(temperature=0.0, max_tokens=request.new, ignore_eos=True)
        handle = self._client.submit(request.prompt, params)
        times = [time.perf_counter() async for _ in handle]
        return LoadAnswer(times, len(times), (await handle).cached_tokens)


def main() -> None:
    """Connect to the server that the job names, then answer until stdin ends."""
    job = json.loads(sys.argv[1])
    client: SocketClient | HttpClient
    if "socket" in job:
        client = SocketClient(job["socket"], job["busy_poll"])
    else:
        client = HttpClient(job["url"], job["model"], 60.0)
    print(json.dumps({"mark": "loaded"}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        requests = [Asked(*one) for one in zip(asked["prompts"], asked["new"], asked["arrivals"], strict=True)]
        answers = client.run(requests, asked["concurrency"])
        print(json.dumps({"lengths": [answer.tokens for answer in answers], "answers": answers}), flush=True)
    os._exit(0)  # without waiting for servers


if __name__ == "__main__":
    main()
