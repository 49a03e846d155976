"""One answer: the record that its engine, or the reader of a connection, writes, and what a user reads of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from compiled_llm.requests.columns import AnswerColumn
from compiled_llm.requests.outputs import Completion, FinishReason
from compiled_llm.requests.users_code import described, raise_interrupt

if TYPE_CHECKING:  # imports torch
    from compiled_llm.requests.text.answer_text import AnswerText, TextFormat

C = TypeVar("C", bound=AnswerColumn)


@dataclass(eq=False, kw_only=True)
class AnswerRecord(Generic[C]):
    """What is known of one answer. One thread writes it; any may read it, also in a process that it was sent to."""

    index: int = 0  # which of its prompt's answers it is
    stop_token_ids: frozenset[int]  # end it, and have no text
    parts: dict[str, C] = field(default_factory=dict)  # what it has besides tokens, by the names of features
    finish_reason: FinishReason | None = None  # None while it has not ended
    stop_reason: int | str | None = None  # the stop string, or the one of the user's stop tokens, that has ended it
    error: BaseException | None = None
    tokens: list[int] = field(default_factory=list, init=False)  # those that have come; the list only grows

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def place(self) -> str:
        """Its state, while it has not ended."""
        return "under way"


class TextOwner(Protocol):
    """Who makes text of an answer's tokens.

    Attributes:
        tokenizer_call: the call that takes a tokenizer, as a user writes it.
        failure: the error that ends an answer which cannot be decoded.
        is_engine: whether stop strings end answers here; otherwise the process that sends them has looked for these.
    """

    tokenizer_call: str
    failure: type[RuntimeError]
    is_engine: bool


class Answer:
    """One answer as its reader sees it. In its engine, a token counts once it was searched for stop strings."""

    def __init__(self, record: AnswerRecord[Any], owner: TextOwner, form: TextFormat | None = None) -> None:
        """Read what a record has; ``form`` says how tokens become text, if there is a tokenizer."""
        self.record = record
        self.index = record.index  # its number among the prompt's answers
        self.text: AnswerText | None = None  # its text as it comes; None until it is asked for
        self._form = form
        self._owner = owner
        self._searched: AnswerText | None = None
        if form is not None and form.stop and owner.is_engine:
            self._searched = self.begin_text()

    @property
    def done(self) -> bool:
        return self.record.finish_reason is not None and (self._searched is None or self._searched.ended)

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self.record.tokens) if self._searched is None else self._searched.count

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended; None while it has not. A stop string comes before whatever has ended it later."""
        if self._searched is not None and self._searched.stop is not None:
            return "stop"
        return "error" if self.error is not None else self.record.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string, or the one of ``stop_token_ids``, that has ended it."""
        if self._searched is not None and self._searched.stop is not None:
            return self._searched.stop
        return self.record.stop_reason if self.finish_reason == "stop" else None

    @property
    def error(self) -> BaseException | None:
        """The error that has ended it with ``"error"``."""
        if self._searched is not None and self._searched.stop is not None:
            return None
        return self.record.error or (None if self.text is None else self.text.error)

    def tokens_after(self, count: int) -> list[int]:
        """Return its tokens after the first ``count``."""
        if self._searched is None:
            return self.record.tokens[count:]
        return self.record.tokens[count : self._searched.count]

    def rows(self, name: str, start: int, tokens: Sequence[int]) -> Sequence[Any] | None:
        """Return what a feature gives each of these tokens, from number ``start`` on; None if it was not asked for."""
        column = self.record.parts.get(name)
        return None if column is None else column.rows(start, tokens)

    def begin_text(self) -> AnswerText:
        """Return its text as it comes, from the first token on; ValueError if there is no tokenizer."""
        if self._form is None:
            raise ValueError(f"text() needs a tokenizer; give {self._owner.tokenizer_call}, or decode the tokens")
        if self.text is None:
            from compiled_llm.requests.text.answer_text import AnswerText

            self.text = AnswerText(self.record, self._form)
        return self.text

    def read_text(self) -> None:
        """Make the text of the tokens that have come, if it has begun; what the tokenizer raises ends this text."""
        if self.text is not None and not self.text.ended:
            try:
                self.text.read()
            except BaseException as error:
                self.text.fail(self._undecodable(error))

    def read_to_stop(self) -> None:
        """Make what text has begun; if it may have a stop string, also one that has not, which ends there."""
        if self._form is not None and self._form.stop:
            self.begin_text()
        self.read_text()

    def completion(self) -> Completion:
        """Return the output once it is ``done``."""
        text, reason, error = None if self.text is None else self.text.whole, self.finish_reason, self.error
        tokens = self.tokens_after(0)
        if text is None and self._form is not None:
            try:
                text = self._form.text_of(self.record, tokens)
            except BaseException as failure:
                failed = self._undecodable(failure)
                if error is None:
                    reason, error = "error", failed
        found: dict[str, Any] = {}
        for column in self.record.parts.values():
            found |= column.completion(self)
        return Completion(
            index=self.index,
            token_ids=tokens,
            finish_reason=reason or "cancelled",
            text=text,
            error=error,
            stop_reason=self.stop_reason,
            **found,
        )

    def _undecodable(self, error: BaseException) -> RuntimeError:
        raise_interrupt(error)
        failure = self._owner.failure(f"the tokenizer cannot decode the answer: {described(error)}")
        failure.__cause__ = error
        return failure
