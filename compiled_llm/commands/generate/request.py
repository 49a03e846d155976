"""One call of `compiled-llm generate`: what was asked, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compiled_llm.commands.options.prompt import check_system
from compiled_llm.commands.options.running import RunningOptions
from compiled_llm.commands.options.sampling import SamplingFlags, check_range


@dataclass(frozen=True, kw_only=True)
class GenerateRequest(RunningOptions):
    """One call of `compiled-llm generate`, its prompt read.

    Attributes:
        prompt: the text to continue, or with ``chat`` the message to answer.
        system: the system message of the chat, if there is one.
        stop: texts that end the answer.
        as_json: write one JSON object in place of the text.
    """

    prompt: str
    chat: bool
    system: str | None
    sampling: SamplingFlags
    max_new_tokens: int
    stop: Sequence[str]
    model: str
    as_json: bool

    def __post_init__(self) -> None:
        """Check what can be checked before a model is loaded.

        Raises:
            ValueError: a value is impossible, or two do not go together.
        """
        check_range("max_new_tokens", self.max_new_tokens)
        check_system(self.system, self.chat)
        if "" in self.stop:
            raise ValueError("--stop '': an empty text stops nothing; leave it out")
        self.wrap_config("cpu")

    def generate_options(self) -> dict[str, Any]:
        """Return the keyword arguments of ``generate``, tensors and streamer aside."""
        stopping = {"stop_strings": list(self.stop)} if self.stop else {}
        return {"max_new_tokens": self.max_new_tokens, **self.sampling.options(), **stopping}
