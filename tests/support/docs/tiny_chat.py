"""What pages and examples find in place of the demo model, and of a server in another terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import compiled_llm
from support.characters import character_tokenizer
from support.server.engine_processes import engine_in_thread, operating
from support.server.running_servers import running_server
from support.tiny_models import tiny_qwen3

CHAT = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_chat_model(folder: Path) -> Path:
    """Write a tiny model, with a tokenizer of one token a character, and return its folder."""
    tiny_qwen3(eos_token_id=None, num_hidden_layers=1).save_pretrained(folder)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder


def loaded(folder: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(folder), tokenizer


@contextmanager
def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `compiled-llm serve demo` serves in another terminal, with `--uds llm.sock`, over HTTP, and operations."""
    model, tokenizer = loaded(folder)
    # Answers that nobody bounds, of a model that makes no sense, take all pages: a second of a core for 1,000 tokens.
    engine = compiled_llm.Engine(compiled_llm.wrap(model, kv_memory="500 tokens"), tokenizer=tokenizer)
    path = Path("llm.sock")
    with (
        engine,
        engine_in_thread(engine, path, tokenizer=folder) as loop,
        operating(engine, loop, Path("operations.sock"), folder),
        running_server(path, names=("demo", "Qwen/Qwen3-0.6B")) as api_server,
    ):
        there, client = {"http://localhost:8000/v1": f"{api_server.url}/v1"}, openai.OpenAI
        monkeypatch.setattr(openai, "OpenAI", lambda base_url, **options: client(base_url=there[base_url], **options))
        yield
