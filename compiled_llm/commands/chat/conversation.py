"""What was said in a chat, and the model that answers: one in this process, or in an engine process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from compiled_llm.commands.connecting import wait_until_ready
from compiled_llm.commands.options.prompt import check_has_template, messages_of, written
from compiled_llm.execution.reporting.progress import ProgressDisplay

if TYPE_CHECKING:  # Client needs the extra `server`
    from compiled_llm.client import Client
    from compiled_llm.engine.engine import Engine
    from compiled_llm.protocol.messages import Ready


@dataclasses.dataclass
class Partner:
    """A model that answers; ``max_tokens`` are those that a prompt may have with its answer."""

    engine: Engine | Client
    name: str
    tokenizer: Any
    max_tokens: int

    def refresh(self) -> bool:
        """Wait until it answers, take its attributes, and return whether it is another model than before."""
        return False


class ClientPartner(Partner):
    """An engine process in another process; if it has gone, the next question looks for its successor."""

    def __init__(self, client: Client, quiet: bool) -> None:
        """Wait until it is ready.

        Raises:
            EngineProcessError: there is none, or it does not want to talk to this client.
            ValueError: it has no tokenizer.
        """
        self.engine = self._client = client
        self._quiet = quiet
        self._ready: Ready | None = None
        self.refresh()

    def refresh(self) -> bool:
        before, ready = self._ready, wait_until_ready(self._client, self._quiet)
        if ready is not before:
            with ProgressDisplay(not self._quiet).task("loading the tokenizer"):
                self.tokenizer = self._client.tokenizer
            self.name, self.max_tokens, self._ready = ready.model, ready.max_tokens, ready
        return before is not None and ready != before


class Conversation:
    """Questions and their answers since the chat began, in ``messages``; ``system`` is the system message, if any."""

    def __init__(self, partner: Partner, system: str | None) -> None:
        """Begin a chat; raises ValueError if there is no template, or if it takes no system message."""
        self.partner = partner
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.prompt("Hi")  # a template that does not take the system message is refused at once

    def prompt(self, question: str) -> list[int]:
        """Return the token ids of the chat with a further question, and the beginning of an answer at the end.

        Raises:
            ValueError: the template does not take it.
        """
        check_template(self.partner.tokenizer)
        *first, last = messages_of(question, self.system)
        return list(written(self.partner.tokenizer, [*first, *self.messages, last], "chat")["input_ids"])

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
