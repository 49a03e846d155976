"""When something came of an answer: tokens that come together are one piece, whoever counts them."""

from __future__ import annotations

from collections.abc import Iterable

_TOGETHER = 50e-6
"""Seconds between what came together and was only read one after the other; a step takes longer."""


def pieces(times: Iterable[float]) -> list[float]:
    """Return when pieces came, by when their tokens, or events, were read."""
    found: list[float] = []
    last = float("-inf")
    for time in times:
        if time - last > _TOGETHER:
            found.append(time)
        last = time
    return found
