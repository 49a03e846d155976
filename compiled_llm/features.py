"""The features that are parts: nothing else imports their files, so that each can be taken out with its line here."""

from __future__ import annotations

import importlib
from typing import Any

FEATURES = {
    "cascade": "compiled_llm.execution.cascade.cascade",
    "structured_outputs": "compiled_llm.engine.grammars.part",
}
"""The module of each."""


def feature(name: str) -> Any:
    """Import a feature's module and return it; None if the feature was taken out."""
    return importlib.import_module(FEATURES[name]) if name in FEATURES else None


def check_has(name: str, asked: str) -> None:
    """Raise ValueError if a feature was taken out that an option, ``asked``, needs."""
    if name not in FEATURES:
        raise ValueError(f"{asked}: this copy of compiled_llm has no {name}; leave it out")
