"""The messages of a chat."""

from __future__ import annotations

from compiled_llm.commands.chat.model import AnsweringModel
from compiled_llm.commands.options.prompt import messages_of


class Conversation:
    """Questions and their answers since the chat began, in ``messages``; ``system`` is the system message, if any."""

    def __init__(self, model: AnsweringModel, system: str | None) -> None:
        """Begin a chat; raises ValueError if the model takes no messages, or no system message."""
        self.model = model
        self.system = system
        self.messages: list[dict[str, str]] = []
        model.check(self.with_question("Hi"))  # a template that does not take the system message is refused at once

    def with_question(self, question: str) -> list[dict[str, str]]:
        *first, last = messages_of(question, self.system)
        return [*first, *self.messages, last]

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
