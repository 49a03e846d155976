"""The messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compiled_llm.commands.chat.model import AnsweringModel
from compiled_llm.commands.options.images import images_in, seen_content
from compiled_llm.commands.options.prompt import messages_of


class Conversation:
    """Questions and their answers since the chat began, in ``messages``; ``system`` is the system message, if any.

    ``images`` are files that go with the next question.
    """

    def __init__(self, model: AnsweringModel, system: str | None, images: Sequence[Path] = ()) -> None:
        """Begin a chat; raises ValueError if the model takes no messages, or no system message."""
        self.model = model
        self.system = system
        self.images: list[Path] = []
        self.messages: list[dict[str, Any]] = []
        model.check(self.with_question("Hi"))  # a template that does not take the system message is refused at once
        self.images += images

    def with_question(self, question: str) -> list[dict[str, Any]]:
        *first, last = messages_of(question, self.system, self.images)
        return [*first, *self.messages, last]

    def add(self, question: str, answer: str) -> None:
        """Go on with a question and its answer; without an answer, as if the question had not been asked."""
        if answer:
            asked = {"role": "user", "content": seen_content(question, self.images)}
            self.messages += [asked, {"role": "assistant", "content": answer}]
            self.images.clear()

    def take_back(self) -> str:
        """Return the last question, which is forgotten with its answer; ValueError if there is none."""
        if not self.messages:
            raise ValueError("/retry: there is no question to answer again")
        *self.messages, question, _ = self.messages
        self.images[:0] = images_in([question])
        content = question["content"]
        return str(content if isinstance(content, str) else content[-1]["text"])
