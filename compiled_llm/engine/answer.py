"""One answer as its reader sees it: what the loop knows of it, and what its text says."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.requests.outputs import Completion, FinishReason, Logprob
from compiled_llm.requests.pending_answer import PendingAnswer
from compiled_llm.requests.text.answer_text import AnswerText, TextFormat


class Answer(PendingAnswer):
    """A request's answer. With stop strings, a token counts once the text up to it has been searched."""

    owner = "compiled_llm.Engine(model, tokenizer=tokenizer)"
    failure = RequestError

    def __init__(self, request: Request, form: TextFormat | None = None) -> None:
        super().__init__(request.index, request, form)
        self.request = request
        self._searched: AnswerText | None = None
        if form is not None and form.stop:
            self._searched = self.begin_text()

    @property
    def done(self) -> bool:
        return self.request.finish_reason is not None and (self._searched is None or self._searched.ended)

    def tokens_behind(self, count: int) -> list[int]:
        if self._searched is None:
            return self.request.tokens[count:]
        return self.request.tokens[count : self._searched.count]

    def logprobs_behind(self, count: int) -> Sequence[dict[int, Logprob]] | None:
        scores = self.request.part("logprobs")
        return None if scores is None else scores.entries(self.tokens_behind(count), count)

    def completion(self) -> Completion:
        whole = super().completion()
        if self.request.part("pooling") is not None:
            return replace(whole, pooled=self.pooled)
        if self.request.part("hidden_states") is None:
            return whole
        return replace(whole, hidden_states=self.hidden_states, emitted=self.emitted)

    @property
    def pooled(self) -> array[float] | None:
        """The vector of its prompt, float32, once it has ended well; None before, or if none is wanted."""
        pooled = self.request.part("pooling")
        return None if pooled is None or self.finish_reason != "length" else pooled.vector

    @property
    def hidden_states(self) -> dict[int, Tensor] | None:
        """Those of its tokens, but for the last; None if none are wanted."""
        return None if (emitted := self._kept) is None else emitted.hidden_states(self._fed)

    @property
    def emitted(self) -> dict[str, Tensor] | None:
        """The outputs of traced hooks for the same tokens, by name; None if the request did not ask for them."""
        return None if (emitted := self._kept) is None else emitted.by_name(self._fed)

    @property
    def _kept(self) -> Any:
        emitted = self.request.part("hidden_states")
        if emitted is not None and self.request.done:
            emitted.end()
        return emitted

    @property
    def _fed(self) -> int:
        """How many tokens were fed in; a stop string may have come before others."""
        return len(self.request.prompt) + max(1, self.tokens) - 1

    @property
    def tokens(self) -> int:
        return len(self.request.tokens) if self._searched is None else self._searched.count

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended; a stop string comes before whatever has ended it later."""
        if self._searched is not None and self._searched.stop is not None:
            return "stop"
        return "error" if self.error is not None else self.request.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        if self._searched is not None and self._searched.stop is not None:
            return self._searched.stop
        tokens = self.request.tokens
        if self.finish_reason == "stop" and tokens and tokens[-1] in self.request.stop_ids:
            return tokens[-1]
        return None

    @property
    def error(self) -> BaseException | None:
        if self._searched is not None and self._searched.stop is not None:
            return None
        failed = None if self.text is None else self.text.error
        return self.request.error or failed
