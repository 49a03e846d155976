"""The model that answers in a chat: in this process, in an engine process, or behind OpenAI's API."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from compiled_llm.commands.options.images import images_in, with_data
from compiled_llm.commands.options.prompt import check_has_template, written
from compiled_llm.commands.remote.answer import Answering
from compiled_llm.commands.remote.connecting import wait_until_ready
from compiled_llm.commands.remote.engine_answer import EngineAnswer

if TYPE_CHECKING:  # Client needs the extra `server`
    from transformers import PreTrainedTokenizerBase

    from compiled_llm.client import Client
    from compiled_llm.commands.remote.http_api import HttpApi
    from compiled_llm.engine.engine import Engine
    from compiled_llm.protocol.messages import Ready

Messages = Sequence[dict[str, Any]]


class AnsweringModel(Protocol):
    """A model that answers chats; ``name`` is for people."""

    name: str

    def refresh(self) -> bool:
        """Wait until it answers, and return whether it is another model than before."""
        ...

    def check(self, messages: Messages) -> None:
        """Raise ValueError if it surely does not take such messages."""
        ...

    def submit(self, messages: Messages, given: dict[str, Any]) -> Answering:
        """Begin an answer; raises ValueError if there can be none."""
        ...

    def figures(self) -> Iterator[tuple[str, str]]:
        """Yield what it has done for all of its clients."""
        ...


@dataclasses.dataclass
class ChatModel:
    """An engine in this process; a prompt and its answer may have ``max_tokens``.

    ``encode_with_images`` makes inputs of messages with images; None if there can be none.
    """

    engine: Engine | Client
    name: str
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int
    sampling: dict[str, int | float]
    encode_with_images: Callable[[Messages], dict[str, Any]] | None = None

    def refresh(self) -> bool:
        return False

    def check(self, messages: Messages) -> None:
        """Raise ValueError if there is no template, or if it does not take such messages."""
        self._tokens(messages)

    def submit(self, messages: Messages, given: dict[str, Any]) -> Answering:
        prompt: Any = self._seen(messages) if images_in(messages) else self._tokens(messages)
        count = len(prompt) if isinstance(prompt, list) else prompt["input_ids"].shape[1]
        if count >= (most := self.max_tokens):
            raise ValueError(
                f"the chat has {count} tokens, and with the answer there can be {most}; /clear begins a new one"
            )
        from compiled_llm.requests.default_sampling import with_defaults
        from compiled_llm.requests.sampling_params import SamplingParams

        longest = min(given["max_tokens"], most - count)
        params = SamplingParams(**{**with_defaults(given, self.sampling), "max_tokens": longest})
        return EngineAnswer(self.engine.submit(prompt, params))

    def figures(self) -> Iterator[tuple[str, str]]:
        stats = self.engine.stats()
        yield "requests", f"{stats.running} running, {stats.waiting} waiting, {stats.finished} finished"
        share = f", {100 * stats.cached_tokens / stats.prompt_tokens:.0f}% cached" if stats.prompt_tokens else ""
        yield "tokens", f"{stats.new_tokens} new, {stats.prompt_tokens} of prompts{share}"
        for name, wait in (("first token", stats.first_token_seconds), ("between tokens", stats.inter_token_seconds)):
            if wait is not None:
                yield name, f"p50 {1000 * wait.p50:.1f} ms, p99 {1000 * wait.p99:.1f} ms"
        if (pages := stats.pages) is not None:
            yield "pages", f"{pages.used} used, {pages.cached} cached, {pages.free} free, of {pages.total}"
        yield "CUDA graphs", f"{stats.cuda_graphs}, and {stats.cold_starts} waits for something to be compiled"

    def _seen(self, messages: Messages) -> dict[str, Any]:
        if self.encode_with_images is None:
            raise ValueError("images: begin the chat with --image FILE, or ask a server by its http:// address")
        return self.encode_with_images(messages)

    def _tokens(self, messages: Messages) -> list[int]:
        check_template(self.tokenizer)
        return list(written(self.tokenizer, messages, "chat")["input_ids"])


class RemoteChatModel(ChatModel):
    """An engine process in another process; if it has gone, the next question looks for its successor."""

    def __init__(self, client: Client, quiet: bool) -> None:
        """Wait until it is ready; EngineProcessError without an engine process, ValueError without a tokenizer."""
        self.engine = self._client = client
        self._quiet = quiet
        self._ready: Ready | None = None
        self.refresh()

    def refresh(self) -> bool:
        before = self._ready
        ready = wait_until_ready(self._client, self._quiet)
        if ready is not before:
            self.tokenizer = self._client.tokenizer
            self.name = ready.model
            self.max_tokens = ready.max_tokens
            self._ready = ready
            self.sampling = ready.sampling
        return before is not None and ready != before


class HttpChatModel:
    """A server of OpenAI's API, which applies the chat template and says itself what it does not take."""

    def __init__(self, api: HttpApi, quiet: bool) -> None:
        """Wait until it is ready; RuntimeError if it cannot be reached."""
        self._api = api
        self._quiet = quiet
        self.name = api.wait_until_ready(quiet)

    def refresh(self) -> bool:
        before = self.name
        self.name = self._api.wait_until_ready(self._quiet)
        return self.name != before

    def check(self, messages: Messages) -> None:
        """Leave it to the server."""

    def submit(self, messages: Messages, given: dict[str, Any]) -> Answering:
        return self._api.submit(self.name, with_data(messages), given)

    def figures(self) -> Iterator[tuple[str, str]]:
        yield "the server", f"its figures are at {self._api.url}/metrics"


def check_template(tokenizer: object) -> None:
    check_has_template(tokenizer, "chat", "`compiled-llm generate` continues a text")
