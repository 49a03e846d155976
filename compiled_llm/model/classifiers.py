"""Classifiers: models whose head scores a whole text by its last token."""

from __future__ import annotations

from typing import Any

_ENDING = "ForSequenceClassification"


def is_classifier(model: Any) -> bool:
    """Whether a HuggingFace model has such a head, by the name of its class."""
    return any(kind.__name__.endswith(_ENDING) for kind in type(model).__mro__)
