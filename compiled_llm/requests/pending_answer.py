"""One answer on its way, in the engine's process or another; torch is imported once its text is asked for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from compiled_llm.requests.outputs import Completion, FinishReason, Logprob
from compiled_llm.requests.users_code import described, raise_interrupt

if TYPE_CHECKING:  # imports torch
    from compiled_llm.requests.text.answer_text import AnswerText, TextFormat, Written


class PendingAnswer(ABC):
    """One answer as its reader sees it."""

    owner: ClassVar[str]  # the argument that takes a tokenizer, as a user writes it
    failure: ClassVar[type[RuntimeError]]  # the error that ends an answer which cannot be decoded

    def __init__(self, index: int, written: Written, form: TextFormat | None) -> None:
        """``form``: how tokens become text; None without a tokenizer."""
        self.index = index  # its number among the prompt's answers
        self.text: AnswerText | None = None  # its text as it comes; None until it is asked for
        self._written = written
        self._format = form

    @property
    @abstractmethod
    def done(self) -> bool: ...

    @property
    @abstractmethod
    def tokens(self) -> int:
        """How many tokens it has."""

    @property
    @abstractmethod
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended; None while it has not."""

    @property
    @abstractmethod
    def stop_reason(self) -> int | str | None:
        """The stop string, or the one of ``stop_token_ids``, that has ended it."""

    @property
    @abstractmethod
    def error(self) -> BaseException | None:
        """The error that has ended it with ``"error"``."""

    @abstractmethod
    def tokens_behind(self, count: int) -> list[int]:
        """Return its tokens after the first ``count``."""

    @abstractmethod
    def logprobs_behind(self, count: int) -> Sequence[dict[int, Logprob]] | None:
        """Return the entries of at least as many tokens after the first ``count``; None if not asked for."""

    def begin_text(self) -> AnswerText:
        """Return its text as it comes, from the first token on; ValueError if there is no tokenizer."""
        if self._format is None:
            raise ValueError(f"text() needs a tokenizer; give {self.owner}, or decode the tokens")
        if self.text is None:
            from compiled_llm.requests.text.answer_text import AnswerText

            self.text = AnswerText(self._written, self._format)
        return self.text

    def read_text(self) -> None:
        """Make the text of the tokens that have come, if it has begun; what the tokenizer raises ends this text."""
        if self.text is not None and not self.text.ended:
            try:
                self.text.read()
            except BaseException as error:
                self.text.fail(self._undecodable(error))

    def completion(self) -> Completion:
        """Return the output once it is ``done``."""
        text, reason, error = self._whole_text(), self.finish_reason or "cancelled", self.error
        tokens = self.tokens_behind(0)
        if text is None and self._format is not None:
            try:
                text = self._format.text_of(self._written, tokens)
            except BaseException as failure:
                failed = self._undecodable(failure)
                if error is None:
                    reason, error = "error", failed
        return Completion(
            index=self.index,
            token_ids=tokens,
            finish_reason=reason,
            text=text,
            error=error,
            stop_reason=self.stop_reason,
            logprobs=self.logprobs_behind(0),
        )

    def _whole_text(self) -> str | None:
        """Return its text if that has ended."""
        return None if self.text is None else self.text.whole

    def _undecodable(self, error: BaseException) -> RuntimeError:
        raise_interrupt(error)
        failure = self.failure(f"the tokenizer cannot decode the answer: {described(error)}")
        failure.__cause__ = error
        return failure
