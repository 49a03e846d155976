"""Log-probabilities as ``/v1/completions`` writes them."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_llm.protocol.messages import Entry
from compiled_llm.server.openai.chat.logprobs import LEAST
from compiled_llm.server.openai.completions.response import CompletionLogprobs
from compiled_llm.server.openai.tokenizer.token_bytes import TokenNames


class CompletionScores:
    """A writer of log-probabilities of one answer; text offsets go on from piece to piece."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def written(self, places: Sequence[Sequence[Entry] | None], first: int | None = None) -> CompletionLogprobs:
        """Return the log-probabilities of further tokens: of each its own entry, then the most likely ones'."""
        tokens = [first if entries is None else entries[0][0] for entries in places]
        return CompletionLogprobs(
            text_offset=[self._advanced(token) for token in tokens],
            token_logprobs=[None if entries is None else max(entries[0][1], LEAST) for entries in places],
            tokens=["" if token is None else self._names(token) for token in tokens],
            top_logprobs=[None if entries is None else self._top(entries) for entries in places],
        )

    def _top(self, entries: Sequence[Entry]) -> dict[str, float]:
        named = dict[str, float]()
        for token, logprob, _ in entries:  # of tokens with one text, the first: the own, or else the most likely
            named.setdefault(self._names(token), max(logprob, LEAST))
        return named

    def _advanced(self, token: int | None) -> int:
        offset = self._offset
        self._offset += 0 if token is None else len(self._names.text(token))
        return offset
