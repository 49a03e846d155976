"""How many tokens of prompts the prefix caches of two replicas have: by our router, and by Ray's own, which draws two
replicas at random and takes the one with the shorter queue.

Chats of several turns about a few documents, of which each replica's cache holds about half; each chat waits for its
answer before it goes on, and several go on at once. Needs the extra `ray`.

    python tools/replicas.py
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from typing import Any, NamedTuple

import httpx
import ray
from ray import serve

from compiled_llm.server import ray_app

WORDS = (
    *("the", "of", "and", "to", "in", "that", "he", "shall", "unto", "for", "his", "a", "lord", "they", "be", "is"),
    *("him", "not", "them", "it", "with", "all", "thou", "thy", "was", "which", "my", "me", "said", "but", "ye"),
)
URL = "http://127.0.0.1:{port}"


WIDTH = 36


class Count(NamedTuple):
    """Tokens of prompts, those of them that were cached, and how long it took."""

    prompt: int
    cached: int
    seconds: float


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


async def chat(client: httpx.AsyncClient, document: str, draw: random.Random, turns: int) -> list[dict[str, Any]]:
    """One chat about a document; the usage of each turn."""
    messages, usages = [{"role": "system", "content": document}], []
    for _ in range(turns):
        messages.append({"role": "user", "content": words(draw, 30)})
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        response = await client.post("/v1/chat/completions", json=body)
        answer = response.raise_for_status().json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        usages.append(answer["usage"])
    return usages


async def load(url: str, arguments: argparse.Namespace) -> Count:
    draw = random.Random(arguments.seed)
    documents = [words(draw, arguments.words) for _ in range(arguments.documents)]
    free = asyncio.Semaphore(arguments.at_once)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(number: int) -> list[dict[str, Any]]:
            own = random.Random(number)
            async with free:
                return await chat(client, own.choice(documents), own, arguments.turns)

        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.2)
        began = time.monotonic()
        usages = [usage for chat in await asyncio.gather(*map(one, range(arguments.chats))) for usage in chat]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return Count(sum(usage["prompt_tokens"] for usage in usages), cached, time.monotonic() - began)


def run(arguments: argparse.Namespace, replicas: int, tokens: int, **router: Any) -> Count:
    """Serve replicas whose caches hold so many tokens, and load them."""
    actors = {"ray_actor_options": {"num_cpus": 1, "num_gpus": 0 if arguments.device == "cpu" else 1}}
    app = ray_app(
        arguments.model,
        replicas=replicas,
        replica_options={**actors, **router},
        api_server_options={"ray_actor_options": {"num_cpus": 0}},
        device=arguments.device,
        mode=arguments.mode,
        kv_memory=f"{tokens} tokens",
        max_num_seqs=16,
        warmup=1,
        quiet=True,
        max_longer=arguments.max_longer,
    )
    serve.run(app)
    try:
        return asyncio.run(load(URL.format(port=arguments.port), arguments))
    finally:
        serve.delete("default")


def cases(tokens: int) -> dict[str, dict[str, Any]]:
    return {
        "by leading pages": {"replicas": 2, "tokens": tokens},
        "by Ray's own router": {"replicas": 2, "tokens": tokens, "request_router_config": {}},
        "one replica with room for everything": {"replicas": 1, "tokens": 100_000},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", default="eager")
    parser.add_argument("--tokens", type=int, default=3000, help="that a replica's cache holds")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--words", type=int, default=300, help="of a document")
    parser.add_argument("--chats", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--most-longer", type=int, default=4)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    ray.init(num_cpus=max(3, os.cpu_count() or 0), include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": arguments.port})
    try:
        for name, options in cases(arguments.tokens).items():
            count = run(arguments, **options)
            share = f"{100 * count.cached / count.prompt:.0f}%"
            print(f"{name:{WIDTH}} {share:>4} of {count.prompt:,} tokens of prompts cached, {count.seconds:.0f} s")
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
