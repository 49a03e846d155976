"""SmolLM2 in real processes: what the engine says in process is what comes over the socket and over HTTP."""

from __future__ import annotations

import asyncio
import re
import shlex
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import compiled_llm
from compiled_llm.client import Client
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.docs.pages import CHECKOUT
from support.server.engine_processes import PATIENCE
from support.server.running_servers import serving

OPTIONS = ("--mode", "eager", "--warmup", "1", "--kv-memory", "40000 tokens")
QUESTION: Any = [{"role": "user", "content": "Name the capital of France, and say what it is known for."}]

pytestmark = pytest.mark.whole


class Served(NamedTuple):
    """The demo model, served."""

    url: str
    socket: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        path = Path(folder) / "socket"
        with serving("demo", "--uds", str(path), *OPTIONS) as (_, url):
            while httpx.get(f"{url}/ready").status_code != 200:
                time.sleep(0.1)
            yield Served(url, path)


@pytest.fixture(scope="module")
def engine(demo_model_dir: Path) -> Iterator[Engine]:
    loaded = AutoModelForCausalLM.from_pretrained(demo_model_dir)
    model = compiled_llm.wrap(loaded, mode="eager", progress=False, kv_memory="20000 tokens")
    with Engine(model, tokenizer=AutoTokenizer.from_pretrained(demo_model_dir)) as engine:
        yield engine


def test_readmes_curl_is_answered(served: Served) -> None:
    (line,) = re.findall(r"^curl (.+)$", (CHECKOUT / "README.md").read_text(), re.MULTILINE)
    address, _, header, _, body = shlex.split(line)
    name, _, value = header.partition(": ")
    url = served.url + address.removeprefix("localhost:8000")
    answer = httpx.post(url, content=body, headers={name: value}, timeout=3 * PATIENCE)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


def chats(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=5 * PATIENCE, max_retries=0)


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "drawn"])
def test_tokens_are_equal_in_process_over_the_socket_and_over_http(
    served: Served, engine: Engine, given: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=24, **given)
    (expected,) = engine.generate([QUESTION], params)
    with Client(served.socket, tokenizer=True) as client:
        (output,) = client.generate([QUESTION], params)
    assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
    body = {"messages": QUESTION, "max_tokens": 24, **given}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=PATIENCE).json()
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["completion_tokens"] == len(expected.token_ids)


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "drawn"])
def test_sixty_four_equal_questions_have_one_answer_and_a_cached_prompt(served: Served, given: dict[str, Any]) -> None:
    async def all_of_them() -> list[Any]:
        async with chats(served) as client:
            ask = client.chat.completions.create
            first = await ask(model="demo", messages=QUESTION, max_tokens=12, **given)
            return [
                first,
                *await asyncio.gather(
                    *(ask(model="demo", messages=QUESTION, max_tokens=12, **given) for _ in range(63))
                ),
            ]

    answers = asyncio.run(all_of_them())
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert len({answer.id for answer in answers}) == 64
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers[1:]]
    assert min(cached) >= answers[0].usage.prompt_tokens - 17  # all whole pages


def test_two_hundred_streams_at_once(served: Served) -> None:
    async def stream(client: openai.AsyncOpenAI, number: int) -> tuple[int, str]:
        chunks = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": f"Count from {number % 8}."}],
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, tokens = "", 0
        async for chunk in chunks:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return tokens, text

    async def all_of_them() -> list[tuple[int, str]]:
        async with chats(served) as client:
            return await asyncio.gather(*(stream(client, number) for number in range(200)))

    answers = asyncio.run(all_of_them())
    assert all(tokens and text for tokens, text in answers)
    assert [len(set(answers[first::8])) for first in range(8)] == [1] * 8
    text = httpx.get(f"{served.url}/metrics").text
    assert 'compiled_llm_pages{state="used"} 0.0' in text
    assert "compiled_llm_running 0.0" in text
