"""What cases leave out for now: known differences, each until it is mended."""

from __future__ import annotations

KNOWN: dict[str, str] = {
    "overridden methods": "what an instance overrides is skipped",
    "inner hooks": "hooks on inner modules see packed tokens during generate",
    "subclassed criteria": "rules of subclasses of EosTokenCriteria and MaxLengthCriteria are ignored",
    "another default device": "calls inside another default device raise",
    "windows and holes": "sliding windows count stored tokens, HuggingFace's count columns",
    "modules with a config of their own": "a copied attention module keeps HuggingFace's attention",
}


def may(feature: str) -> bool:
    """Whether cases have this feature."""
    return feature not in KNOWN
