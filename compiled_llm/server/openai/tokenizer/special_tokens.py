"""Special tokens that clients write in their texts are kept text: ``<|im_start|>`` in a message begins no message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "\ufdd0"
"""Parts a special token in a client's text from itself; Unicode has it as no character, for use within programs."""
_AT_ONCE = 1024  # pieces that are made tokens at once: each takes a kilobyte or two meanwhile


class SpecialTokenBreaker:
    """A tokenizer that does not see special tokens in clients' texts, since they are broken before."""

    # A chat template writes its own special tokens around these texts. So those of the texts get a mark inside before
    # the template runs; its output is parted at the marks, and each piece is tokenized by itself. One of a single
    # character cannot be parted, and is left alone.

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        names = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        self._names = sorted(name for name in names if len(name) > 1)
        self._firsts = {name[0] for name in self._names}
        self._beginnings = tuple({name[:stop] for name in self._names for stop in range(1, len(name))})

    def broken(self, value: object) -> Any:
        """Return JSON values with a mark in each special token of their texts and names."""
        # A text that ends as a special token begins ends with a mark, too: a template may write the rest of one.
        if isinstance(value, str):
            broken = self._broken(value)
            return broken + _MARK if broken.endswith(self._beginnings) else broken
        if isinstance(value, Mapping):
            return {self._broken(name): self.broken(entry) for name, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.broken(entry) for entry in value]
        return value

    def _broken(self, text: str) -> str:
        if not any(first in text for first in self._firsts):
            return text
        for name in self._names:  # one by one: an expression of them all would keep the GIL for seconds
            while name in text:  # again, since one may overlap itself
                text = text.replace(name, name[0] + _MARK + name[1:])
        return text

    def tokens(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text with marks; ``add_special_tokens`` adds the tokenizer's own around it."""
        pieces = [piece for piece in text.split(_MARK) if piece]
        tokens = list(self._tokens(pieces))
        if not add_special_tokens:
            return tokens
        before, after = self._around(pieces[0])
        return [*before, *tokens, *after]

    def _tokens(self, pieces: list[str]) -> Iterator[int]:
        for start in range(0, len(pieces), _AT_ONCE):
            for tokens in self._tokenizer(pieces[start : start + _AT_ONCE], add_special_tokens=False)["input_ids"]:
                yield from tokens

    def _around(self, text: str) -> tuple[list[int], list[int]]:
        """Return the tokens that the tokenizer puts before and after a text."""
        inner, whole = (list(self._tokenizer(text, add_special_tokens=own)["input_ids"]) for own in (False, True))
        starts = range(len(whole) - len(inner) + 1)
        start = next(start for start in starts if whole[start : start + len(inner)] == inner)
        return whole[:start], whole[start + len(inner) :]
