"""Keys for a prompt's leading pages, by which prompts are compared."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

_KEY_BYTES = 16


def leading_pages(prompt: Sequence[int], salt: str | None, page_size: int, max_pages: int) -> list[bytes]:
    """Return a key for each full page of ``page_size`` tokens; prompts with equal keys are equal up to there."""
    tokens, hashed = array("q", prompt), hashlib.blake2b(_salted(salt), digest_size=_KEY_BYTES)
    keys = []
    for end in range(page_size, min(len(tokens), max_pages * page_size) + 1, page_size):
        hashed.update(tokens[end - page_size : end].tobytes())  # on top of all before
        keys.append(hashed.digest())
    return keys


def _salted(salt: str | None) -> bytes:
    """Return bytes of a length that does not depend on the salt, so that no salt can look like tokens."""
    return hashlib.blake2b(b"" if salt is None else b"salt " + salt.encode("utf-8", "surrogatepass")).digest()
