"""Run as a program: `compiled-llm chat` with a stand-in for the model, which counts until it is stopped."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from compiled_llm.commands.chat.chat import COMMANDS, Chat
from compiled_llm.commands.chat.conversation import Conversation
from compiled_llm.commands.chat.model import ChatModel
from compiled_llm.commands.chat.terminal import Terminal
from compiled_llm.requests.outputs import Completion, RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams


class Tokenizer:
    """Of which a token is a message."""

    chat_template = "a template"

    def apply_chat_template(self, messages: Sequence[Any], **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(messages)))}


class Handle:
    """Counts from 1, or as far as it is to."""

    def __init__(self, prompt: Sequence[int], most: int) -> None:
        self._prompt, self._most, self._written, self._cancelled = list(prompt), most, 0, False

    def text(self) -> Iterator[str]:
        for number in itertools.count(1):
            if self._cancelled or number > self._most:
                return
            self._written = number
            yield f"{number} "
            time.sleep(0.01)

    def cancel(self) -> None:
        self._cancelled = True

    def result(self) -> RequestOutput:
        reason = "cancelled" if self._written < self._most else "length"
        answer = Completion(index=0, token_ids=[0] * self._written, finish_reason=reason)  # type: ignore[arg-type]
        return RequestOutput(self._prompt, [answer], 0, 0.0, 0.1, 1.0)


class Counting:
    """An engine of which an answer is numbers."""

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Any:
        return Handle(prompt, params.max_tokens or 0)

    def stats(self) -> Any:
        waits = {"queue_seconds": None, "first_token_seconds": None, "inter_token_seconds": None, "pages": None}
        counts = ("running", "waiting", "finished", "new_tokens", "prompt_tokens", "cuda_graphs", "cold_starts")
        return SimpleNamespace(**dict.fromkeys(counts, 0), cached_tokens=0, **waits)


if __name__ == "__main__":
    engine: Any = Counting()
    model = ChatModel(engine, "a stand-in", Tokenizer(), 100_000, {})
    Chat(Conversation(model, None), {"max_tokens": int(sys.argv[1])}, Terminal(commands=COMMANDS)).run()
    assert "torch" not in sys.modules
