"""The front's tokenizer: prompts of texts and messages, text and bytes of tokens."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from compiled_llm.client.tokenizer import tokenizer_of
from compiled_llm.protocol.messages import Ready
from compiled_llm.server.front.api_error import invalid


def load_tokenizer(ready: Ready) -> Any:
    """Return the tokenizer that a generator names.

    Raises:
        ValueError: it names none.
    """
    if ready.gguf_file is None:  # one of a GGUF file is read by HuggingFace's code for weights
        go_without_torch()
    return tokenizer_of(True, ready)


def go_without_torch() -> None:
    """Have transformers find no torch in this process; seconds and half a gigabyte less, for tokenizers alone.

    ``AutoTokenizer`` imports torch if it is installed. A module that is None in ``sys.modules`` is one that cannot be
    found. Ends when transformers imports tokenizers without it.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that there is no torch


class Vocabulary:
    """Makes prompts of what requests have, and says what a token is.

    Attributes:
        tokenizer: HuggingFace's.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Use a tokenizer."""
        self.tokenizer = tokenizer

    def of_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text.

        Raises:
            ApiError: it is none, though JSON can write it.
        """
        _check(text, "prompt")
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def of_chat(
        self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any] | None = None, **options: Any
    ) -> list[int]:
        """Return the tokens of a chat, written by the model's template.

        Args:
            messages: as templates read them.
            template: what the template reads besides.
            **options: of ``apply_chat_template``.

        Raises:
            ApiError: there is no template, or it does not take these messages.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise invalid("messages: the model has no chat template; use /v1/completions", "messages")
        for message in messages:
            _check(message["content"], "messages")
        self._check_template(template or {})
        options |= template or {}
        try:
            return list(self.tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"])
        except (TemplateError, ValueError, TypeError) as error:
            raise invalid(f"messages: the model's chat template does not take them: {error}", "messages") from error

    def _check_template(self, given: Mapping[str, Any]) -> None:
        """Check that a request says nothing but what the template reads: no template of its own, which could loop."""
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        if taken := [name for name in given if name in own]:
            raise invalid(f"chat_template_kwargs: {taken[0]} is not for the template to read", "chat_template_kwargs")

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


def _check(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(f"{param}: half a character of UTF-16 is no text", param) from None
