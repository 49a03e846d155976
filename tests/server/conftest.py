from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.server.engine_process import engine_server
from support.engine.text_tokenizers import byte_level
from support.parity import assert_account_is_empty
from support.server.engine_processes import Loop, engine_in_thread
from support.server.running_servers import chat_tokenizer
from support.tiny_models import tiny_qwen3


@pytest.fixture(autouse=True, scope="session")
def _heartbeats_come_between_any_two_messages() -> Iterator[None]:
    """As they do on a machine that is busy enough, so that no test passes by being quicker than they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_server, "_BEAT_SECONDS", 0.002)
        yield


@pytest.fixture
def folder() -> Iterator[Path]:
    """Its own, since pytest's can be longer than the path of a socket."""
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        yield Path(folder)


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "socket"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that goes on for ever, with a chat template."""
    folder = tmp_path_factory.mktemp("served") / "tiny-model"
    tiny_qwen3(eos_token_id=None, num_hidden_layers=1, vocab_size=380).save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(one_thread: None) -> PreTrainedModel:
    options: dict[str, Any] = {"page_size": 4, "kv_memory": "6000 tokens", "max_batch_size": 4, "progress": False}
    plain = tiny_qwen3(eos_token_id=1, num_hidden_layers=1, vocab_size=380)
    return compiled_llm.wrap(plain, mode="eager", **options)


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model, tokenizer=byte_level()) as engine:
        yield engine
    assert_account_is_empty(model)


@pytest.fixture
def engine_process(engine: Engine, path: Path) -> Iterator[Loop]:
    with engine_in_thread(engine, path) as loop:
        yield loop
