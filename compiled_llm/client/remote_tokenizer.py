"""The tokenizer of an engine process, used from here: nothing is loaded, and transformers is not imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from compiled_llm.client.client import Client
from compiled_llm.protocol.messages import AskText, AskTokens, TextReply, TokensReply


class RemoteTokenizer:
    """A tokenizer in an engine process, asked over a connection a call, so that any thread may use it."""

    chat_template = "that of the engine process"
    clean_up_tokenization_spaces = False

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Return a text's tokens as ``input_ids``."""
        return self._tokens(text)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> dict[str, list[int]]:
        """Return the tokens of a chat as ``input_ids``, up to the beginning of an answer; ValueError if refused."""
        return self._tokens([dict(message) for message in messages])

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = list(tokens)
        reply = self._client.ask(lambda number: AskText(number, ids, skip_special_tokens))
        assert isinstance(reply, TextReply)
        return reply.text

    def _tokens(self, prompt: str | list[dict[str, Any]]) -> dict[str, list[int]]:
        reply = self._client.ask(lambda number: AskTokens(number, prompt))
        assert isinstance(reply, TokensReply)
        return {"input_ids": reply.tokens}

    @cached_property
    def _client(self) -> Client:
        return Client(self._path)
