"""What cases leave out for now: known differences, each until it is mended."""

from __future__ import annotations

KNOWN: dict[str, str] = {
    "overridden methods": "what an instance overrides is skipped",
    "inner hooks": "hooks on inner modules see packed tokens during generate",
    "subclassed criteria": "rules of subclasses of EosTokenCriteria and MaxLengthCriteria are ignored",
    "default device": "calls inside another default device raise",
    "windows and holes": "sliding windows count stored tokens, HuggingFace's count columns",
    "config asks for outputs": "config.output_hidden_states with beams or embeddings raises",
    "copied modules": "a copied attention module keeps HuggingFace's attention, of its own config",
}


def may(feature: str) -> bool:
    """Whether cases have this feature."""
    return feature not in KNOWN
