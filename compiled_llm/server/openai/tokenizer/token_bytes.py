"""The bytes of a token, which need be no whole character."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of a tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = "ByteLevel" in str(getattr(backend, "decoder", None))
        added = {} if backend is None else backend.get_added_tokens_decoder()
        self._added = {token: str(entry.content) for token, entry in added.items()}

    def __call__(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._is_byte_level and all(character in _byte_level() for character in piece):
            return bytes(_byte_level()[character] for character in piece)
        if (byte := _BYTE.fullmatch(piece)) is not None:
            return bytes([int(byte.group(1), 16)])
        return str(piece).replace("▁", " ").encode("utf-8", "replace")


class TokenNames:
    """The names of tokens where their log-probabilities stand: texts, or ``token_id:7``; texts may be the same."""

    def __init__(self, token_bytes: TokenBytes, as_ids: bool = False) -> None:
        self.bytes = token_bytes
        self._as_ids = as_ids

    def text(self, token: int) -> str:
        return self.bytes(token).decode("utf-8", "replace")

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self.text(token)


@cache
def _byte_level() -> dict[str, int]:
    """Return GPT-2's bytes by the characters that stand for them: themselves, if they can be printed."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printed)
    return {chr(byte): byte for byte in printed} | {chr(256 + number): byte for number, byte in enumerate(others)}
