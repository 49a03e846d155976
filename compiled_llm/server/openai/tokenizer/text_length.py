"""Which texts have too many tokens, told before they are made tokens: that takes hundreds of times their size."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from compiled_llm.server.http.api_error import invalid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PIECE = 2**17  # characters that are made tokens at once to count them: tens of megabytes
_EACH = 2  # characters a token: a text of fewer takes no more to be made tokens than an answer to it does


class TextLength:
    """A check of texts for more than ``max_tokens``, the room of the model with the answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, most: int) -> None:
        self._tokenizer = tokenizer
        self._most = most

    def is_long(self, characters: int) -> bool:
        """Whether a text of so many characters has to be looked at."""
        return characters > self._most

    def check(self, text: str, param: str) -> None:
        """Raise ApiError, of the field ``param``, if a text surely has too many tokens."""
        # A long one is counted in pieces, until it has too many tokens. Where it is cut, it may have more of them than
        # as a whole, as many as the longest token has bytes.
        if not self.is_long(len(text)):
            return
        if len(text) > self._most * self._longest:
            raise self._too_long(text, param)
        if len(text) <= max(_PIECE, _EACH * self._most):
            return
        tokens = 0
        for start in range(0, len(text), _PIECE):
            tokens += max(0, self._count(text[start : start + _PIECE]) - 4 * self._longest)
            if tokens > self._most:
                raise self._too_long(text, param)

    @cached_property
    def _longest(self) -> int:
        """The most characters of a token; a token of unknown text counts for one."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def _count(self, text: str) -> int:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return len(backend.encode_batch_fast([text], add_special_tokens=False)[0])  # a batch, which leaves the GIL

    def _too_long(self, text: str, param: str) -> Exception:
        message = (
            f"{param}: {len(text):,} characters are more than {self._most:,} tokens, and there can be no more with the "
            "answer; shorten it (truncate_prompt_tokens cuts tokens, which so long a text is not made)"
        )
        return invalid(message, param, "context_length_exceeded")
