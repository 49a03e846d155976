"""SmolLM2 in real processes: what the engine says in process is what comes over the socket and over HTTP."""

from __future__ import annotations

import re
import shlex
import tempfile
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
from support.server.engine_processes import PATIENCE, until
from support.server.running_servers import serving

OPTIONS = ("--mode", "eager", "--warmup", "1", "--kv-memory", "40000 tokens")
QUESTION: Any = [{"role": "user", "content": "Name the capital of France, and say what it is known for."}]

pytestmark = pytest.mark.whole


class Served(NamedTuple):
    """The demo model, served."""

    url: str
    socket: Path
    process: int


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        path = Path(folder) / "socket"
        with serving("demo", "--uds", str(path), *OPTIONS) as (process, url):
            until(lambda: httpx.get(f"{url}/ready", verify=False).status_code == 200)
            yield Served(url, path, process.pid)


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


@pytest.mark.parametrize("given", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "drawn"])
def test_tokens_are_equal_in_process_by_socket_and_by_http(
    served: Served, engine: Engine, given: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=24, **given)
    (expected,) = engine.generate([QUESTION], params)
    with Client(served.socket, tokenizer=True) as client:
        (output,) = client.generate([QUESTION], params)
        assert "".join(client.stream(QUESTION, params)) == expected.text
    assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
    http: Any = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    assert [model.id for model in http.models.list()] == ["demo"]
    asked = {"model": "demo", "messages": QUESTION, "max_tokens": 24, **given}
    answer = http.chat.completions.create(**asked)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage.completion_tokens == len(expected.token_ids)
    stream = http.chat.completions.create(**asked, stream=True)
    assert "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices) == expected.text
    assert "libtorch" not in Path(f"/proc/{served.process}/maps").read_text()
