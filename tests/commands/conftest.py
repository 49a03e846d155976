from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import compiled_llm
from compiled_llm.engine.engine import Engine
from support.characters import character_tokenizer
from support.commands.foreign_folder import STANDARD, ForeignFolder, imported
from support.server.engine_processes import engine_in_thread
from support.tiny_models import tiny_qwen3

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] == 'forbidden' %}{{ raise_exception('no such message') }}{% endif %}"
    "<{{ message['role'] }}: {{ message['content'] }}>"
    "{% endfor %}"
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 that never stops, with a tokenizer of one token a character."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3(eos_token_id=None).save_pretrained(folder)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> ForeignFolder:
    """A folder of another user, none of whose files may be executed."""
    return ForeignFolder(tmp_path_factory.mktemp("another_user") / "folder", imported() | STANDARD)


@pytest.fixture
def engine(model_folder: Path) -> Iterator[Engine]:
    model: Any = compiled_llm.wrap(AutoModelForCausalLM.from_pretrained(model_folder), mode="eager", progress=False)
    with Engine(model, tokenizer=AutoTokenizer.from_pretrained(model_folder), max_num_seqs=2) as engine:
        yield engine


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="uds-") as folder:
        yield Path(folder) / "socket"


@pytest.fixture
def socket(model_folder: Path, engine: Engine, path: Path) -> Iterator[Path]:
    """An engine process of the model."""
    with engine_in_thread(engine, path, tokenizer=model_folder):
        yield path
