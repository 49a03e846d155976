"""The messages of a chat."""

from __future__ import annotations

from typing import Any

from compiled_llm.commands.chat.model import ChatModel
from compiled_llm.commands.options.prompt import check_has_template, messages_of, written


class Conversation:
    """Questions and their answers since the chat began, in ``messages``; ``system`` is the system message, if any."""

    def __init__(self, model: ChatModel, system: str | None) -> None:
        """Begin a chat; raises ValueError if there is no template, or if it takes no system message."""
        self.model = model
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.prompt("Hi")  # a template that does not take the system message is refused at once

    def prompt(self, question: str) -> list[int]:
        """Return the token ids of the chat with a further question, and the beginning of an answer at the end.

        Raises:
            ValueError: the template does not take it.
        """
        check_template(self.model.tokenizer)
        *first, last = messages_of(question, self.system)
        return list(written(self.model.tokenizer, [*first, *self.messages, last], "chat")["input_ids"])

    def add(self, question: str, answer: str) -> None:
        """Go on with a question and its answer; without an answer, as if the question had not been asked."""
        if answer:
            self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def take_back(self) -> str:
        """Return the last question, which is forgotten with its answer; raises ValueError if there is none."""
        if not self.messages:
            raise ValueError("/retry: there is no question to answer again")
        *self.messages, question, _ = self.messages
        return question["content"]


def check_template(tokenizer: Any) -> None:
    check_has_template(tokenizer, "chat", "`compiled-llm generate` continues a text")
