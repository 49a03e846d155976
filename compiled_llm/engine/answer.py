"""One answer as its reader sees it: what the loop knows of it, and what its text says."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_llm.engine.steps.logprobs import token_logprobs
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.requests.answer_text import AnswerText, TextFormat
from compiled_llm.requests.outputs import Completion, FinishReason, Logprob
from compiled_llm.requests.users_code import described, raise_interrupt


class Answer:
    """A request's answer. With stop strings, a token counts once the text up to it has been searched.

    Attributes:
        request: what the loop knows.
        text: its text as it comes; None while nobody has asked for it.
    """

    def __init__(self, request: Request, form: TextFormat | None = None) -> None:
        """Begin before the first token.

        Args:
            request: what the loop knows.
            form: how tokens become text; None without a tokenizer.
        """
        self.request = request
        self._format = form
        self.text: AnswerText | None = None
        self._searched: AnswerText | None = None
        if form is not None and form.stop:
            self._searched = self.begin_text()

    def begin_text(self) -> AnswerText:
        """Return its text as it comes, from the first token on.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self._format is None:
            raise ValueError(
                "text() needs a tokenizer; give compiled_llm.Engine(model, tokenizer=tokenizer), or decode the tokens"
            )
        if self.text is None:
            self.text = AnswerText(self.request, self._format)
        return self.text

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.request.finish_reason is not None and (self._searched is None or self._searched.ended)

    def tokens_behind(self, count: int) -> list[int]:
        """Return its tokens behind the first ``count``."""
        if self._searched is None:
            return self.request.tokens[count:]
        return self.request.tokens[count : self._searched.count]

    def logprobs_behind(self, count: int) -> Sequence[dict[int, Logprob]] | None:
        """Return the entries of its tokens behind the first ``count``; None if it does not want them."""
        tokens = self.tokens_behind(count)
        return token_logprobs(self.request, tokens, count)

    @property
    def tokens(self) -> int:
        """How many tokens it has."""
        return len(self.request.tokens) if self._searched is None else self._searched.count

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended; a stop string comes before whatever has ended it later."""
        if self._searched is not None and self._searched.stop is not None:
            return "stop"
        return "error" if self.error is not None else self.request.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string, or the one of ``stop_token_ids``, that has ended it."""
        if self._searched is not None and self._searched.stop is not None:
            return self._searched.stop
        tokens = self.request.tokens
        if self.finish_reason == "stop" and tokens and tokens[-1] in self.request.stop_ids:
            return tokens[-1]
        return None

    @property
    def error(self) -> BaseException | None:
        """What has ended it with ``"error"``."""
        if self._searched is not None and self._searched.stop is not None:
            return None
        failed = None if self.text is None else self.text.error
        return self.request.error or failed

    def completion(self) -> Completion:
        """Return what it came to."""
        tokens, reason, error = self.tokens_behind(0), self.finish_reason or "cancelled", self.error
        text = None if self.text is None else self.text.whole
        if text is None and self._format is not None:
            try:
                text = self._format.text_of(self.request, tokens)
            except BaseException as failure:
                raise_interrupt(failure)
                if error is None:
                    reason, error = "error", tokenizer_failure(failure)
        return Completion(
            index=self.request.index,
            token_ids=tokens,
            finish_reason=reason,
            text=text,
            error=error,
            stop_reason=self.stop_reason,
            logprobs=token_logprobs(self.request, tokens),
        )


def tokenizer_failure(error: BaseException) -> RequestError:
    """Return what ends a request whose tokens the tokenizer cannot decode."""
    failure = RequestError(f"the tokenizer cannot decode the answer: {described(error)}")
    failure.__cause__ = error
    return failure
