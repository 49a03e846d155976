"""What cases leave out for now: known differences, each until it is mended."""

from __future__ import annotations

KNOWN: dict[str, str] = {
    "inner hooks": "hooks on inner modules see packed tokens during generate",
    "default device": "calls inside another default device raise",
    "windows and holes": "sliding windows count stored tokens, HuggingFace's count columns",
    "copied modules": "a copied attention module keeps HuggingFace's attention, of its own config",
}


def may(feature: str) -> bool:
    """Whether cases have this feature."""
    return feature not in KNOWN
