"""Log-probabilities as ``/v1/completions`` writes them."""

from __future__ import annotations

from collections.abc import Sequence

from compiled_llm.protocol.messages import Entry
from compiled_llm.server.front.completion_response import CompletionLogprobs
from compiled_llm.server.front.token_bytes import TokenBytes

_LEAST = -9999.0


class CompletionScores:
    """Writes log-probabilities of one answer, from its beginning on; text offsets go on from piece to piece."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        """Begin at the beginning of the text.

        Args:
            token_bytes: tells the bytes of tokens.
        """
        self._token_bytes = token_bytes
        self._offset = 0

    def written(self, places: Sequence[Sequence[Entry] | None], first: int | None = None) -> CompletionLogprobs:
        """Return what is written of further tokens.

        Args:
            places: for each token its own entry, then those of the likeliest; None if it has none.
            first: the token of a place without entries, which begins a prompt.
        """
        tokens = [self._name(first if entries is None else entries[0][0]) for entries in places]
        offsets = [self._advanced(token) for token in tokens]
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[None if entries is None else max(entries[0][1], _LEAST) for entries in places],
            tokens=tokens,
            top_logprobs=[None if entries is None else self._top(entries) for entries in places],
        )

    def _top(self, entries: Sequence[Entry]) -> dict[str, float]:
        """Return the chosen token, and the likeliest ones."""
        return {self._name(token): max(logprob, _LEAST) for token, logprob, _ in entries}

    def _advanced(self, token: str) -> int:
        offset = self._offset
        self._offset += len(token)
        return offset

    def _name(self, token: int | None) -> str:
        return "" if token is None else self._token_bytes(token).decode("utf-8", "replace")
