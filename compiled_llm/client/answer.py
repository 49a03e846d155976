"""One answer of an engine process, as far as it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compiled_llm.client.errors import EngineProcessError, refusal
from compiled_llm.protocol.messages import Entry, Update
from compiled_llm.requests.outputs import Completion, Logprob
from compiled_llm.requests.users_code import described, raise_interrupt

if TYPE_CHECKING:  # what makes text imports torch
    from compiled_llm.requests.answer_text import AnswerText, TextFormat
    from compiled_llm.requests.outputs import FinishReason


@dataclass
class Received:
    """What has come of an answer; only the thread that reads the connection writes it.

    Attributes:
        stop_token_ids: tokens that end it.
        tokens: so far.
        logprobs: of each of them, if they are wanted.
        finish_reason: why it has ended; None while it has not.
        stop_reason: the stop string or token that has ended it.
        error: what has, with ``"error"``.
    """

    stop_token_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[Entry]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether nothing more comes."""
        return self.finish_reason is not None

    def take(self, update: Update) -> None:
        """Take what is new."""
        if update.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += update.logprobs  # in place: an answer may have many tokens
        self.tokens += update.tokens
        if (ended := update.ended) is not None:
            self.stop_reason = ended.stop_reason
            self.error = None if ended.error is None else refusal(ended.kind, ended.error)
            self.finish_reason = ended.finish_reason  # last: whoever sees it finds the rest


class RemoteAnswer:
    """One answer, as its reader sees it.

    Attributes:
        index: which of its prompt's answers it is.
        received: what has come.
        text: its text as it comes; None while nobody has asked for it.
    """

    def __init__(self, index: int, received: Received, form: TextFormat | None) -> None:
        """Begin before the first token.

        Args:
            index: which of its prompt's answers it is.
            received: takes what comes.
            form: how tokens become text; None without a tokenizer.
        """
        self.index = index
        self.received = received
        self.text: AnswerText | None = None
        self._format = form

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.received.done

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self.received.tokens)

    @property
    def error(self) -> BaseException | None:
        """What has ended it with ``"error"``."""
        return self.received.error or (None if self.text is None else self.text.error)

    def tokens_behind(self, count: int) -> list[int]:
        """Return its tokens behind the first ``count``."""
        return self.received.tokens[count:]

    def logprobs_behind(self, count: int) -> list[dict[int, Logprob]] | None:
        """Return the entries of its tokens behind the first ``count``; None if they are not wanted."""
        logprobs = self.received.logprobs
        return None if logprobs is None else [entries_of(entries) for entries in logprobs[count:]]

    def begin_text(self) -> AnswerText:
        """Return its text as it comes, from the first token on.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self._format is None:
            raise ValueError("text() needs a tokenizer; give Client(path, tokenizer=...), or decode the tokens")
        if self.text is None:
            from compiled_llm.requests.answer_text import AnswerText

            self.text = AnswerText(self.received, self._format)
        return self.text

    def read_text(self) -> None:
        """Make the text of the tokens that have come, if somebody has asked for it."""
        if self.text is not None and not self.text.ended:
            try:
                self.text.read()
            except BaseException as error:  # of the tokenizer: it ends this text alone
                raise_interrupt(error)
                self.text.fail(_tokenizer_failure(error))

    def completion(self) -> Completion:
        """Return what it came to."""
        received, error = self.received, self.error
        try:
            text = self._whole_text()
        except BaseException as failure:
            raise_interrupt(failure)
            text, error = None, error or _tokenizer_failure(failure)
        logprobs = None if received.logprobs is None else [entries_of(entries) for entries in received.logprobs]
        return Completion(
            index=self.index,
            token_ids=list(received.tokens),
            finish_reason="error" if error is not None else received.finish_reason or "cancelled",
            text=text,
            error=error,
            stop_reason=received.stop_reason,
            logprobs=logprobs,
        )

    def _whole_text(self) -> str | None:
        if self._format is None:
            return None
        if self.text is None and not self._format.stop:
            return self._format.text_of(self.received, self.received.tokens)
        self.begin_text()
        self.read_text()
        return None if self.text is None else self.text.whole


def entries_of(entries: Sequence[Entry]) -> dict[int, Logprob]:
    """Return the log-probabilities of one place, by token id; the token that stands there first."""
    return {token: Logprob(logprob, rank) for token, logprob, rank in entries}


def _tokenizer_failure(error: BaseException) -> EngineProcessError:
    failure = EngineProcessError(f"the tokenizer cannot decode the answer: {described(error)}")
    failure.__cause__ = error
    return failure
