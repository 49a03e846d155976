from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.server.engine_process.facts import ready_of
from support.parity import assert_account_is_empty
from support.server.engine_processes import Loop
from support.server.running_servers import RunningServer, chat_tokenizer, running_server
from support.server.scripted import Script, scripted, tool_tokenizer


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model, tokenizer=chat_tokenizer()) as engine:
        yield engine
    assert_account_is_empty(model)


@pytest.fixture(scope="module")
def engine_process(engine: Engine) -> Iterator[Loop]:
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        chat_tokenizer().save_pretrained(Path(folder) / "tokenizer")
        loop = Loop(Path(folder) / "socket")
        ready = ready_of(engine._model, engine, "tiny", chat_tokenizer(), str(Path(folder) / "tokenizer"))
        loop.server.open(engine, ready)
        yield loop
        loop.close()


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
    """An API server of an engine process that says what a test has written."""
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        path = Path(folder) / "socket"
        with scripted(path, tool_tokenizer()) as script, running_server(path) as api_server:
            yield script, api_server


@pytest.fixture
def script(speaking: tuple[Script, RunningServer]) -> Script:
    """What that engine process says; at first nothing."""
    script = speaking[0]
    script.text, script.at_once, script.reason, script.allowed = "", 3, "stop", None
    return script
