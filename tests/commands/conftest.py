from __future__ import annotations

from pathlib import Path

import pytest

from support.characters import character_tokenizer
from support.commands.foreign_folder import STANDARD, ForeignFolder, imported
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
    """Somebody else's folder, none of whose files may be executed."""
    return ForeignFolder(tmp_path_factory.mktemp("somebodys") / "folder", imported() | STANDARD)
