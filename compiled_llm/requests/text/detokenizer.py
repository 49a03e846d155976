"""Incremental detokenization: the joined pieces are the tokenizer's text of all tokens."""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from compiled_llm.compat.tokenizers import backend_of, cleans_up, special_tokens

_INCOMPLETE = "\ufffd"  # the character that decoders write for bytes that are no whole character, or not yet one
_RUN = 16  # after so many tokens without a whole character, one is looked for only as often: each look decodes them all


class TokenDecoder:
    """A tokenizer's way of making text of tokens; one for all requests of an engine."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer``: HuggingFace's, or any object with its ``decode``."""
        self.tokenizer = tokenizer
        self.backend = backend_of(tokenizer)
        self.special = special_tokens(self.backend)
        self.cleans_up = cleans_up(tokenizer)

    def text(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """Return a detokenizer for one answer."""
        kind = _WindowDetokenizer if self.backend is None else _StreamDetokenizer
        return kind(self, skip_special_tokens)


class Detokenizer(ABC):
    """A detokenizer of the tokens of one answer; one thread at a time."""

    # A token's text comes once its characters are complete. Joined, the pieces are ``tokenizer.decode`` of all tokens;
    # only where byte tokens turn out to be no UTF-8 does it take back a character, which pieces cannot.

    def __init__(self, decoder: TokenDecoder, skip_special_tokens: bool) -> None:
        self._text = functools.partial(decoder.text, skip_special_tokens=skip_special_tokens)
        self._cleanup = SpaceCleanup(decoder.tokenizer) if decoder.cleans_up else None
        self._without_text: Collection[int] = decoder.special if skip_special_tokens else ()
        self._held: list[int] = []  # tokens whose text has not come
        self._tried = 0  # how many of them ``_piece`` has seen

    def add(self, token: int) -> str:
        """Return the text that a token completes: often its own, sometimes none."""
        if token in self._without_text:
            return ""
        held = self._held
        held.append(token)
        if len(held) > _RUN and len(held) % _RUN:
            return ""
        piece = self._piece()
        if piece is None:
            self._tried = len(held)
            return ""
        self._held = []
        self._tried = 0
        return piece if self._cleanup is None else self._cleanup.add(piece)

    @abstractmethod
    def _piece(self) -> str | None:
        """Return the text of the tokens that are held; None while it is incomplete."""

    def remaining(self, tokens: Sequence[int], given: str) -> tuple[str, str]:
        """Return the last piece, incomplete characters included, and the whole text; ``given`` is all earlier text."""
        whole = self._text(tokens)
        return (whole[len(given) :] if whole.startswith(given) else self._text(self._held)), whole


class _StreamDetokenizer(Detokenizer):
    """A window as ``_WindowDetokenizer``, in ``tokenizers``: a third of the time."""

    def __init__(self, decoder: TokenDecoder, skip_special_tokens: bool) -> None:
        super().__init__(decoder, skip_special_tokens)
        assert decoder.backend is not None, "others decode by windows"
        self._backend = decoder.backend
        self._new = functools.partial(DecodeStream, skip_special_tokens=skip_special_tokens)
        self._stream = self._new()

    def _piece(self) -> str | None:
        try:
            piece = self._stream.step(self._backend, self._held[self._tried :])
        except Exception:  # bytes before it, of which text has come, are no character together with it: begin again
            self._stream = self._new()
            piece = self._stream.step(self._backend, self._held)
        return str(piece) if piece else None


class _WindowDetokenizer(Detokenizer):
    """A window of the latest tokens, decoded together with those before them: text depends on its left context."""

    def __init__(self, decoder: TokenDecoder, skip_special_tokens: bool) -> None:
        super().__init__(decoder, skip_special_tokens)
        options = {"clean_up_tokenization_spaces": False} if decoder.cleans_up else {}
        self._decode: Callable[[list[int]], str] = functools.partial(
            decoder.tokenizer.decode, skip_special_tokens=skip_special_tokens, **options
        )
        self._before: list[int] = []  # tokens whose text came last
        self._before_text = ""

    def _piece(self) -> str | None:
        text = self._decode([*self._before, *self._held])
        if text.endswith(_INCOMPLETE) or len(text) <= len(self._before_text):
            return None
        if not text.startswith(self._before_text):  # see ``_StreamDetokenizer``
            self._before_text = ""
            text = self._decode(self._held)
        piece = text[len(self._before_text) :]
        self._before = self._held
        self._before_text = self._decode(self._before)
        return piece


class SpaceCleanup:
    """A tokenizer's ``clean_up_tokenization``, which removes spaces before punctuation, for text in pieces."""

    # A space, and characters after it that may belong to such a place, are held back until it is known whether the
    # space stays.

    _UNSETTLED = re.compile(r" [ 'n]*[vr]?$")
    """A beginning of anything that it looks for (``" ' "``, ``" n't"``, ``" 've"``, …), after any of the others."""

    def __init__(self, tokenizer: Any) -> None:
        self._clean: Callable[[str], str] = tokenizer.clean_up_tokenization
        self._held = ""

    def add(self, piece: str) -> str:
        """Return the text that a piece settles."""
        text = self._held + piece
        unsettled = self._UNSETTLED.search(text)
        settled = len(text) if unsettled is None else unsettled.start()
        self._held = text[settled:]
        return self._clean(text[:settled])
