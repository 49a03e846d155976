"""The API server's tokenizer: prompts of texts and messages, text and bytes of tokens."""

from __future__ import annotations

import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from compiled_llm.client.tokenizer import tokenizer_of
from compiled_llm.protocol.messages import Ready
from compiled_llm.requests import prompts
from compiled_llm.server.http.api_error import ApiError, invalid
from compiled_llm.server.openai.parsing.answer_parts import Parts
from compiled_llm.server.openai.parsing.call_form import SAMPLE_TOOL, CallForm, call_form, sample_chat
from compiled_llm.server.openai.parsing.response_template import response_template_of
from compiled_llm.server.openai.tokenizer.special_tokens import SpecialTokenBreaker
from compiled_llm.server.openai.tokenizer.text_length import TextLength

logger = logging.getLogger("compiled_llm.server")

_NOT_SERVED = "unsupported_value"


class TokenizerError(RuntimeError):
    """A tokenizer that cannot be loaded; to try again would not help."""


def load_vocabulary(ready: Ready, escapes: bool = False) -> Vocabulary:
    """Return the vocabulary of the tokenizer that an engine process names; TokenizerError if it cannot be loaded."""
    try:
        if ready.gguf_file is None:  # one of a GGUF file is read by HuggingFace's code for weights
            go_without_torch()
        return Vocabulary(tokenizer_of(True, ready), ready.model_type, ready.eos_token_ids, ready.max_tokens, escapes)
    except BaseException as error:  # in a thread that does nothing else; a panic of tokenizers is no Exception
        raise TokenizerError(f"the tokenizer cannot be loaded: {type(error).__name__}: {error}") from error


def go_without_torch() -> None:
    """Have transformers find no torch in this process: seconds and half a gigabyte less, for tokenizers alone."""
    # ``AutoTokenizer`` imports torch if it is installed; a module that is None in ``sys.modules`` cannot be found. Ends
    # when transformers imports tokenizers without it.
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that there is no torch


class Vocabulary:
    """A tokenizer of prompts of at most ``max_tokens`` with their answers, which decodes tokens, too."""

    def __init__(
        self,
        tokenizer: Any,
        model_type: str = "",
        ends: Sequence[int] = (),
        max_tokens: int = sys.maxsize,
        escapes: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        # how the model writes its answers; None if they are all content
        self.response_template = response_template_of(tokenizer, model_type)
        self._ends = ends
        self._length = TextLength(tokenizer, max_tokens)
        self._special = SpecialTokenBreaker(tokenizer) if escapes else None
        self._has_told = False

    def of_text(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Return the tokens of a text of field ``param``; ApiError if it cannot be encoded, or surely has too many."""
        check_texts(text, param)
        self._length.check(text, param)
        if self._special is not None and (broken := self._special.broken(text)) != text:
            return self._special.tokens(broken, add_special_tokens)
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def check_fits(self, text: str, param: str) -> None:
        """Raise ApiError, of the field ``param``, if a text surely has more tokens than the model has room for."""
        self._length.check(text, param)

    @cached_property
    def added(self) -> tuple[int, int]:
        """How many special tokens the tokenizer adds before a text, and after it."""
        sample = "a"
        plain, whole = (self.tokenizer(sample, add_special_tokens=added)["input_ids"] for added in (False, True))
        places = range(len(whole) - len(plain) + 1)
        before = next((place for place in places if whole[place : place + len(plain)] == plain), 0)
        return before, len(whole) - len(plain) - before

    def of_pair(self, text: str, other: str, param: str) -> list[int]:
        """Return the tokens of a pair of texts; ApiError, which names ``param``, as of ``of_text``."""
        for each in (text, other):
            check_texts(each, param)
            self._length.check(each, param)
            if self._special is not None and self._special.broken(each) != each:
                raise invalid(
                    f"{param}: a text of a pair has a special token, which --escape-special-tokens does not let "
                    "through there; leave it out",
                    param,
                )
        return list(self.tokenizer(text, other)["input_ids"])

    def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[int]:
        """Return the tokens of a chat, written by the model's template.

        Raises:
            ApiError: there is no template, or it does not take these messages; or they surely have too many tokens.
        """
        messages, options = self._checked(messages, template, tools, options)
        with _of_template():
            given = [messages, options]
            if self._special is not None and (broken := self._special.broken(given)) != given:
                return self._special.tokens(self._written(*broken))
            if self._length.is_long(sum(map(len, prompts.strings_in([messages, tools])))):
                self._written(messages, options)
            return list(self.tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"])

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: object,
    ) -> str:
        """Return a chat with images as the model's template writes it; ApiError as of ``of_chat``."""
        messages, options = self._checked(messages, template, tools, options)
        with _of_template():
            given = [messages, options]
            if self._special is not None and self._special.broken(given) != given:
                raise invalid(
                    "messages: a text beside images has a special token, which --escape-special-tokens does not let "
                    "through there; leave it out",
                    "messages",
                )
            return self._written(messages, options)

    def _checked(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        options: dict[str, Any],
    ) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
        """Return messages and all options as the template takes them; ApiError if it cannot."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise invalid("messages: the model has no chat template; use /v1/completions", "messages")
        check_texts(messages, "messages")
        self._check_template(template or {})
        self._check_tools(tools)
        if self._reads_parts_alone:
            messages = [_in_parts(message) for message in messages]
        return messages, options | {**(template or {}), **({"tools": tools} if tools else {})}

    @cached_property
    def _reads_parts_alone(self) -> bool:
        """Whether the template looks for parts of messages, and would leave out contents that are texts."""
        template = str(self.tokenizer.chat_template)
        return bool(re.search(r"['\"]image['\"]", template)) and not re.search(r"\bis\s+(not\s+)?string\b", template)

    def _written(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Return a chat as its template writes it; ApiError if it is too long."""
        written = str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        self._length.check(written, "messages")
        return written

    def _check_template(self, given: Mapping[str, Any]) -> None:
        """Check that a request gives variables of the template alone: no template of its own, which could loop."""
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        if taken := [name for name in given if name in own]:
            raise invalid(f"chat_template_kwargs: {taken[0]} is not for the template to read", "chat_template_kwargs")

    def _check_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Check that the template writes tools; log once if calls in answers cannot be found."""
        if not tools:
            return
        check_texts(tools, "tools")
        if not re.search(r"\btools\b", str(self.tokenizer.chat_template)):
            raise invalid("tools: is not served: the model's chat template does not write them", "tools", _NOT_SERVED)
        if not (self._has_told or (self.response_template is not None and self.response_template.has_calls)):
            self._has_told = True
            logger.warning(
                "compiled_llm: calls of tools come as plain text: the tokenizer has no response_template for them"
            )

    @cached_property
    def call_form(self) -> CallForm | None:
        """How the model writes calls of tools; None if that cannot be told."""
        template = self.response_template
        if template is None or not template.has_calls:
            return None
        prompt, one, two = map(self._sample, range(3))
        if prompt is None or one is None:
            return None
        thought = template.begun(prompt) or ""
        ends = [text for text in (*map(self.text, ([end] for end in self._ends)), self.tokenizer.eos_token) if text]

        def read(text: str) -> Parts:
            return template.reader(prompt, [SAMPLE_TOOL]).read(thought + text, finished=True)

        return call_form(prompt, one, two, ends, read)

    def _sample(self, calls: int) -> str | None:
        """Return a chat that ends with so many calls, or before the answer; None if the template does not take it."""
        options = {"tools": [SAMPLE_TOOL], "add_generation_prompt": not calls}
        try:
            return str(self.tokenizer.apply_chat_template(sample_chat(calls), tokenize=False, **options))
        except Exception:  # of code that came with the model
            return None

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))


@contextmanager
def _of_template() -> Iterator[None]:
    """Have errors of a template be the client's: it is code that came with the model."""
    try:
        yield
    except ApiError:  # it is too long
        raise
    except Exception as error:
        said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise invalid(f"messages: the model's chat template does not take them: {said}", "messages") from error


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    return message if not isinstance(content, str) else {**message, "content": [{"type": "text", "text": content}]}


def check_texts(value: object, param: str) -> None:
    """Check all texts in a JSON value; ApiError if one cannot be encoded."""
    try:
        prompts.check_texts(value, param)
    except ValueError as error:
        raise invalid(str(error), param) from None
