"""A chat as the model sees it, and how answers to it are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from compiled_llm.server.openai.fields.tools import Offer
from compiled_llm.server.openai.parsing.answer_parts import PartsReader, PlainReader
from compiled_llm.server.openai.parsing.response_template import ResponseTemplate
from compiled_llm.server.openai.tokenizer.vocabulary import Vocabulary


@dataclass(frozen=True)
class ChatPrompt:
    """A chat as the model sees it; its text is empty without a response template."""

    tokens: list[int]
    text: str
    offer: Offer
    vocabulary: Vocabulary

    @property
    def template(self) -> ResponseTemplate | None:
        return self.vocabulary.response_template

    def reader(self) -> PartsReader:
        """Return a reader of one answer."""
        if self.template is None:
            return PlainReader()
        return self.template.reader(self.text, self.offer.plain(), self.offer.several)


class Ending(Protocol):
    """A request that may say how a chat ends."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None


def end_of_chat(asked: Ending) -> dict[str, Any]:
    """Return options of ``apply_chat_template``: the answer begins, unless the last message goes on."""
    goes_on, begins = bool(asked.continue_final_message), asked.add_generation_prompt
    return {"add_generation_prompt": not goes_on if begins is None else begins, "continue_final_message": goes_on}


def chat_prompt(
    vocabulary: Vocabulary,
    messages: Sequence[Mapping[str, Any]],
    offer: Offer,
    template: Mapping[str, Any] | None = None,
    **options: Any,
) -> ChatPrompt:
    """Return a chat as the model sees it; a long one takes seconds.

    Args:
        vocabulary: of the model.
        messages: as templates read them.
        offer: tools that answers may call.
        template: further variables of the template.
        **options: of ``apply_chat_template``.

    Raises:
        ApiError: the chat template does not take it.
    """
    tokens = vocabulary.of_chat(messages, template, offer.plain(), **options)
    text = "" if vocabulary.response_template is None else vocabulary.text(tokens)
    return ChatPrompt(tokens, text, offer, vocabulary)
