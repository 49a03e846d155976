from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from support.parity import assert_account_is_empty
from support.server.engine_processes import Loop, engine_that_names_its_tokenizer
from support.server.running_servers import RunningServer, chat_tokenizer, running_server
from support.server.scripted import Script, speaking_server, tool_tokenizer


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model, tokenizer=chat_tokenizer()) as engine:
        yield engine
    assert_account_is_empty(model)


@pytest.fixture(scope="module")
def engine_process(engine: Engine) -> Iterator[Loop]:
    with engine_that_names_its_tokenizer(engine) as loop:
        yield loop


@pytest.fixture(scope="module")
def api_server(engine_process: Loop) -> Iterator[RunningServer]:
    with running_server(engine_process.server._path, max_choices=16, max_body_bytes=2**17) as api_server:
        yield api_server


@pytest.fixture(scope="module")
def client(api_server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{api_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def speaking() -> Iterator[tuple[Script, RunningServer]]:
    with speaking_server(tool_tokenizer()) as speaking:
        yield speaking


@pytest.fixture(scope="module")
def speaker(speaking: tuple[Script, RunningServer]) -> RunningServer:
    """The API server of an engine process that says what a test has written."""
    return speaking[1]


@pytest.fixture(scope="module")
def talker(speaker: RunningServer) -> Iterator[Any]:
    """The openai package's client of that server."""
    with openai.OpenAI(base_url=f"{speaker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def script(speaking: tuple[Script, RunningServer]) -> Script:
    """What that engine process says; at first nothing."""
    script = speaking[0]
    script.text, script.at_once, script.reason, script.allowed = "", 3, "stop", None
    return script
