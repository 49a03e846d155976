"""What cases leave out for now: known differences, each until it is mended."""

from __future__ import annotations

KNOWN: dict[str, str] = {
    "windows and holes": "windows count stored tokens, HuggingFace's count columns, in a conversation over pages",
}


def may(feature: str) -> bool:
    """Whether cases have this feature."""
    return feature not in KNOWN
