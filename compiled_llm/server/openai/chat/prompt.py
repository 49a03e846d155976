"""A chat as the model sees it, and how answers to it are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiled_llm.server.openai.fields.response_format import Form
from compiled_llm.server.openai.fields.tools import Offer
from compiled_llm.server.openai.parsing.parsed_reader import ParsedReader
from compiled_llm.server.openai.parsing.response_template import ResponseTemplate
from compiled_llm.server.openai.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True)
class ChatPrompt:
    """A chat as the model sees it; its text is empty without a response template.

    With images it is its text alone: the engine process makes tokens of it.
    """

    tokens: list[int]
    text: str
    offer: Offer
    vocabulary: Vocabulary

    @property
    def template(self) -> ResponseTemplate | None:
        return self.vocabulary.response_template

    def reader(self, form: Form | None) -> ParsedReader | None:
        """Return a reader of one answer, which may have a form; None if all of it is content."""
        if self.template is None:
            return None
        return self.template.reader(self.text, self.offer.plain(), self.offer.several, are_held=form is not None)


def chat_prompt(
    vocabulary: Vocabulary,
    messages: Sequence[Mapping[str, Any]],
    offer: Offer,
    template: Mapping[str, Any] | None = None,
    shows: bool = False,
    **options: object,
) -> ChatPrompt:
    """Return a chat as the model sees it, which takes seconds for a long one; ApiError if the template refuses it.

    Args:
        shows: whether the messages have images.
    """
    if shows:
        written = vocabulary.chat_text(messages, template, offer.plain(), **options)
        return ChatPrompt([], written, offer, vocabulary)
    tokens = vocabulary.of_chat(messages, template, offer.plain(), **options)
    text = "" if vocabulary.response_template is None else vocabulary.text(tokens)
    return ChatPrompt(tokens, text, offer, vocabulary)
