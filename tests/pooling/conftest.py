"""A tiny model and its folder with sentence-transformers' files, and an engine of it, for all tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.engine.engine import Engine
from support.engine.text_tokenizers import byte_level
from support.engine.tiny_engines import tiny, wrapped
from support.parity import assert_account_is_empty
from support.pooling import written


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Qwen3-Embedding's: the last token, normalised, with prompts by name."""
    folder = tmp_path_factory.mktemp("embedder")
    plain: Any = tiny(vocab_size=380, max_position_embeddings=256)
    plain.save_pretrained(folder)
    byte_level().save_pretrained(folder)
    written(folder, prompts={"query": "Find: ", "document": ""})
    assert json.loads((folder / "modules.json").read_text())
    return folder


@pytest.fixture(scope="package")
def engine(folder: Path) -> Iterator[Engine]:
    plain = type(tiny()).from_pretrained(folder)
    ours = wrapped(800, plain, prefill_tokens=16)
    with Engine(ours, tokenizer=byte_level()) as engine:
        yield engine
    assert_account_is_empty(ours)
