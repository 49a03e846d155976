"""The tokenizer of a client: one that its user has, or that a folder names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from compiled_llm.protocol.messages import Ready

Given = str | Path | Literal[True] | Any | None
"""A tokenizer, the folder or the name of one, ``True`` for the one that the engine process names, or None."""


def tokenizer_of(given: Given, ready: Ready) -> Any:
    """Return a tokenizer, which imports transformers; ValueError if the engine process is to name one, and does not."""
    if given is True:
        if ready.tokenizer is None:
            raise ValueError("tokenizer=True: the engine process has no tokenizer; give one, or use token ids")
        tokenizer = _loaded(ready.tokenizer, ready.gguf_file)
        tokenizer.chat_template = ready.chat_template or tokenizer.chat_template
        return tokenizer
    return _loaded(str(given), None) if isinstance(given, (str, Path)) else given


def _loaded(location: str, gguf_file: str | None) -> Any:
    from transformers import AutoTokenizer

    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    return AutoTokenizer.from_pretrained(location, trust_remote_code=False, **options)
