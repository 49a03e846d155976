"""What cases leave out for now: known differences, each until it is mended."""

from __future__ import annotations

KNOWN: dict[str, str] = {}


def may(feature: str) -> bool:
    """Whether cases have this feature."""
    return feature not in KNOWN
