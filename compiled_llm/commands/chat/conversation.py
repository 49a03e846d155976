"""Questions and answers of a chat, as the model's template writes them."""

from __future__ import annotations

from typing import Any


class Conversation:
    """Questions and their answers since the chat began, in ``messages``; ``system`` is the system message, if any."""

    def __init__(self, tokenizer: Any, system: str | None) -> None:
        """Begin a chat; raises ValueError if there is no template, or if it takes no system message."""
        self.tokenizer = tokenizer
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.prompt("Hi")  # a template that does not take the system message is refused at once

    def prompt(self, question: str) -> list[int]:
        """Return the token ids of the chat with a further question, and the beginning of an answer at the end.

        Raises:
            ValueError: the template does not take it.
        """
        from jinja2 import TemplateError

        check_template(self.tokenizer)
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*first, *self.messages, {"role": "user", "content": question}]
        try:
            written = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise ValueError(f"chat: the model's chat template refuses this: {error}") from error
        return list(written["input_ids"])

    def add(self, question: str, answer: str) -> None:
        """Go on with a question and its answer; without an answer, as if the question had not been asked."""
        if answer:
            self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def take_back(self) -> str | None:
        """Remove the last question with its answer, and return the question; None if there is none."""
        if not self.messages:
            return None
        *self.messages, question, _ = self.messages
        return question["content"]


def check_template(tokenizer: Any) -> None:
    """Raise ValueError if a tokenizer has no template for chats."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat: this model's tokenizer has no chat template; `compiled-llm generate` continues a text")
