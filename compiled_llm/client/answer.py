"""One answer of an engine process, with the tokens that have come."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from compiled_llm.client.errors import EngineProcessError, refusal
from compiled_llm.protocol.messages import EmittedPiece, Entry, Update
from compiled_llm.requests.outputs import Completion, FinishReason, Logprob
from compiled_llm.requests.pending_answer import PendingAnswer

if TYPE_CHECKING:  # imports torch
    from compiled_llm.requests.text.answer_text import TextFormat


@dataclass
class Received:
    """An answer as it comes; only the reader of the connection writes it."""

    stop_token_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[Entry]] | None = None
    finish_reason: FinishReason | None = None  # None while it has not ended
    stop_reason: int | str | None = None
    error: Exception | None = None
    # what was emitted of its tokens, by layer or name
    pieces: dict[int | str, list[EmittedPiece]] = field(default_factory=dict)
    pooled: array[float] | None = None  # the vector of its prompt, in place of tokens

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def take(self, update: Update) -> None:
        if update.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += update.logprobs  # in place: an answer may have many tokens
        self.tokens += update.tokens
        if (ended := update.ended) is not None:
            self.stop_reason = ended.stop_reason
            self.error = None if ended.error is None else refusal(ended.kind, ended.error)
            self.finish_reason = ended.finish_reason  # last: a thread that sees it finds the rest


class RemoteAnswer(PendingAnswer):
    """One answer, as its reader sees it; ``received`` is what has come."""

    owner = "Client(path, tokenizer=...)"
    failure = EngineProcessError

    def __init__(self, index: int, received: Received, form: TextFormat | None) -> None:
        super().__init__(index, received, form)
        self.received = received

    @property
    def done(self) -> bool:
        return self.received.done

    @property
    def tokens(self) -> int:
        return len(self.received.tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        return "error" if self.error is not None else self.received.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.received.stop_reason

    @property
    def error(self) -> BaseException | None:
        return self.received.error or (None if self.text is None else self.text.error)

    def tokens_behind(self, count: int) -> list[int]:
        return self.received.tokens[count:]

    def logprobs_behind(self, count: int) -> list[dict[int, Logprob]] | None:
        logprobs = self.received.logprobs
        return None if logprobs is None else [entries_of(entries) for entries in logprobs[count:]]

    def completion(self) -> Completion:
        whole, pieces = replace(super().completion(), pooled=self.received.pooled), self.received.pieces
        if not pieces:
            return whole
        from compiled_llm.client.emitted import joined  # imports torch

        layers = {key: joined(parts) for key, parts in pieces.items() if isinstance(key, int)}
        named = {key: joined(parts) for key, parts in pieces.items() if isinstance(key, str)}
        return replace(whole, hidden_states=layers or None, emitted=named or None)

    def _whole_text(self) -> str | None:
        if self._format is not None and self._format.stop:
            self.begin_text()  # to end where the stop string does
        self.read_text()
        return super()._whole_text()


def entries_of(entries: Sequence[Entry]) -> dict[int, Logprob]:
    """Return the log-probabilities of one place, by token id; the token that stands there first."""
    return {token: Logprob(logprob, rank) for token, logprob, rank in entries}
