"""Bounds the values of a body besides numbers: each takes a hundred bytes and more once it is read."""

from __future__ import annotations

from compiled_llm.server.http.api_error import invalid

MAX_VALUES = 2**16  # texts, names, arrays and objects of a body


def values_in(text: bytes) -> int:
    """Return how many values besides numbers a JSON text has; if more than ``MAX_VALUES``, about how many."""
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    texts = plain.count(b'"') // 2
    if texts <= MAX_VALUES and _opened(plain) + texts > MAX_VALUES:  # else there are few, brackets in texts included
        plain = b"".join(plain.split(b'"')[::2])
    return _opened(plain) + texts


def check_values(body: bytes) -> None:
    """Check, before any of them is made, that JSON has no more than ``MAX_VALUES`` values; ApiError if it has."""
    if len(body) > MAX_VALUES and values_in(body) > MAX_VALUES:
        raise invalid(
            f"the body has more than {MAX_VALUES:,} texts, arrays and objects; send fewer at once",
            code="too_many_values",
        )


def _opened(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{")
