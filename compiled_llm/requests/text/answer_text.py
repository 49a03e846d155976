"""The text of one answer as it comes, and where it stops."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.text.detokenizer import TokenDecoder
from compiled_llm.requests.text.stop_strings import StopReader


class Written(Protocol):
    """The part of a request that detokenization needs, here or in another process; ``ends`` are tokens that end it."""

    stop_token_ids: frozenset[int]

    @property
    def tokens(self) -> list[int]: ...

    @property
    def done(self) -> bool: ...


class TextFormat(NamedTuple):
    """The way in which a request's tokens become text."""

    decoding: TokenDecoder
    stop: tuple[str, ...] = ()
    keeps_stop: bool = False  # leave the stop string, or the token, that has ended an answer in its text
    skip_special_tokens: bool = True
    unsearched: int = 0  # number of first tokens in whose text no stop string ends an answer

    @classmethod
    def of(cls, params: SamplingParams, decoding: TokenDecoder | None) -> TextFormat | None:
        """Return the format for a request; None without a tokenizer, ValueError if that one needs stop strings."""
        stop = params.stop_strings
        if decoding is None and stop:
            raise ValueError(
                f"stop={params.stop!r}: stop strings need a tokenizer; give compiled_llm.Engine(model, "
                "tokenizer=tokenizer), or stop_token_ids"
            )
        if decoding is None:
            return None
        return cls(decoding, stop, params.include_stop_str_in_output, params.skip_special_tokens, params.min_tokens)

    def text_of(self, request: Written, tokens: list[int]) -> str:
        return self.decoding.text(tokens[: self.textual(request, tokens)], self.skip_special_tokens)

    def textual(self, request: Written, tokens: list[int]) -> int:
        """Return how many tokens have a text: all but the one that has ended the answer."""
        return len(tokens) - (bool(tokens) and not self.keeps_stop and tokens[-1] in request.stop_token_ids)


class AnswerText:
    """The text of one answer. One thread at a time updates it; any other may read it meanwhile."""

    # ``shown`` counts the characters that are certain; beyond may be the beginning of a stop string.

    def __init__(self, request: Written, form: TextFormat) -> None:
        self._request = request
        self._format = form
        self._detokenizer = form.decoding.detokenizer(form.skip_special_tokens)
        self._stops = StopReader(form.stop) if form.stop else None
        self.text, self.shown, self.count = "", 0, 0
        self.stop: str | None = None
        self.whole: str | None = None
        self.ended = False
        self.error: BaseException | None = None

    def read(self) -> None:
        """Take the tokens that have come since, up to a stop string."""
        done = self._request.done  # looked at first: no token comes after the end
        for token in self._request.tokens[self.count :]:
            self.count += 1
            if not self._format.keeps_stop and token in self._request.stop_token_ids:
                continue
            piece = self._detokenizer.add(token)
            if self._stops is None:
                self.text += piece
                self.shown = len(self.text)
                continue
            self._add(piece)
            if self.stop is not None:
                return
        if done:
            self._finish()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._end(self.text)

    def _add(self, piece: str) -> None:
        if not piece:
            return
        self.text += piece
        if self._stops is None:
            self.shown = len(self.text)
        elif (match := self._stops.take(piece, self.count > self._format.unsearched)) is not None:
            self.stop = match.string
            self._end(self.text[: match.end if self._format.keeps_stop else match.start])
        else:
            self.shown = len(self.text) - (0 if self._format.keeps_stop else self._stops.begun)

    def _finish(self) -> None:
        tokens = self._request.tokens
        tokens = tokens[: self._format.textual(self._request, tokens)]
        rest, whole = self._detokenizer.remaining(tokens, given=self.text)
        self._add(rest)
        if self.stop is None:
            self._end(self.text, whole)

    def _end(self, text: str, whole: str | None = None) -> None:
        self.text, self.shown = text, len(text)
        self.whole = text if whole is None else whole
        self.ended = True  # last: a thread that sees it sees the rest
