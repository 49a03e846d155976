"""The model that answers in a chat, in this process or in an engine process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from compiled_llm.commands.connecting import wait_until_ready
from compiled_llm.execution.reporting.progress import ProgressDisplay

if TYPE_CHECKING:  # Client needs the extra `server`
    from compiled_llm.client import Client
    from compiled_llm.engine.engine import Engine
    from compiled_llm.protocol.messages import Ready


@dataclasses.dataclass
class ChatModel:
    """A model that answers; ``max_tokens`` are those that a prompt may have with its answer."""

    engine: Engine | Client
    name: str
    tokenizer: Any
    max_tokens: int

    def refresh(self) -> bool:
        """Wait until it answers, take its attributes, and return whether it is another model than before."""
        return False


class RemoteChatModel(ChatModel):
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
