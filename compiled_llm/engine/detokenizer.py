"""Text of tokens that come one by one: pieces, which joined are what the tokenizer makes of all tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from compiled_llm.compat.tokenizers import backend_of, cleans_up

_INCOMPLETE = "\ufffd"
"""What decoders make of bytes that are no whole character, or not yet one."""


class Detokenizer:
    """Turns the tokens of one answer into text; one thread at a time.

    A token's text comes once its characters are complete. Joined, the pieces are ``tokenizer.decode`` of all tokens;
    only where byte tokens end up as no UTF-8, that takes back what had been a character, and pieces cannot.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        """Begin without tokens.

        Args:
            tokenizer: HuggingFace's, or anything with its ``decode``.
            skip_special_tokens: leave special tokens out.
        """
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        backend, self._cleanup = backend_of(tokenizer), SpaceCleanup(tokenizer) if cleans_up(tokenizer) else None
        self._stream = _Window(self._decode_raw) if backend is None else _Stream(backend, skip_special_tokens)

    def add(self, token: int) -> str:
        """Return the text that a token completes; often that of the token, sometimes none."""
        piece = self._stream.add(token)
        return piece if self._cleanup is None else self._cleanup.add(piece)

    def rest(self, tokens: Sequence[int], given: str) -> tuple[str, str]:
        """Return what is left at the end, characters that stay incomplete included.

        Args:
            tokens: all of them.
            given: all pieces so far.

        Returns:
            The last piece, and the whole text.
        """
        whole = self._decode(tokens)
        return (whole[len(given) :] if whole.startswith(given) else self._decode(self._stream.held)), whole

    def _decode(self, tokens: Sequence[int]) -> str:
        return decoded(self._tokenizer, tokens, self._skip)

    def _decode_raw(self, tokens: Sequence[int]) -> str:
        if self._cleanup is None:
            return self._decode(tokens)
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return text


def decoded(tokenizer: Any, tokens: Sequence[int], skip_special_tokens: bool) -> str:
    """Return the text of all tokens at once."""
    text: str = tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
    return text


class _Stream:
    """As ``_Window``, in ``tokenizers``: a third of the time.

    Attributes:
        held: tokens whose text has not come.
    """

    def __init__(self, backend: Any, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._begin()

    def _begin(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self.held: list[int] = []

    def add(self, token: int) -> str:
        self.held.append(token)
        try:
            piece = self._stream.step(self._backend, token)
        except Exception:  # bytes before it, of which text has come, are no character together with it
            piece = self._again()
        if piece is None:
            return ""
        self.held = []
        return piece

    def _again(self) -> str | None:
        """Go on behind the text that has come."""
        held = self.held
        self._begin()
        self.held = held
        return "".join(piece for token in held if (piece := self._stream.step(self._backend, token))) or None


class _Window:
    """Decodes the latest tokens together with those before them, since text depends on what it follows.

    Attributes:
        held: tokens whose text has not come.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._before: list[int] = []  # tokens whose text came last
        self._before_text = ""
        self.held: list[int] = []

    def add(self, token: int) -> str:
        self.held.append(token)
        text = self._decode([*self._before, *self.held])
        if text.endswith(_INCOMPLETE) or len(text) <= len(self._before_text):
            return ""
        if not text.startswith(self._before_text):  # see ``_Stream``
            self._before_text, text = "", self._decode(self.held)
        piece = text[len(self._before_text) :]
        self._before, self.held = self.held, []
        self._before_text = self._decode(self._before)
        return piece


class SpaceCleanup:
    """A tokenizer's ``clean_up_tokenization``, of text that comes in pieces.

    It takes spaces away before punctuation and within contractions. A space, and what may be such after it, is held
    back until it is known whether it stays.
    """

    _UNSETTLED = re.compile(r" [ 'n]*[vr]?$")
    """A beginning of anything that it looks for (``" ' "``, ``" n't"``, ``" 've"``, …), after any of the others."""

    def __init__(self, tokenizer: Any) -> None:
        """Begin without text.

        Args:
            tokenizer: has ``clean_up_tokenization``.
        """
        self._clean: Callable[[str], str] = tokenizer.clean_up_tokenization
        self._held = ""

    def add(self, piece: str) -> str:
        """Return the text that is settled with a piece."""
        text = self._held + piece
        unsettled = self._UNSETTLED.search(text)
        settled = len(text) if unsettled is None else unsettled.start()
        self._held = text[settled:]
        return self._clean(text[:settled])
