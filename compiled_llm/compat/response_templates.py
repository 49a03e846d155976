"""Response templates of models whose tokenizers lack one; ``tests/compat/test_response_templates.py`` tests it."""

# ``transformers.cli.serving.utils._RESPONSE_TEMPLATE_FALLBACKS`` is private: ``transformers serve`` reads the answers
# of Qwen's and Gemma's models with it. Without it, their answers are plain text. Ends when their tokenizers have
# templates, or transformers has a public place for these.

from __future__ import annotations

from typing import Any


def known_response_template(model_type: str) -> dict[str, Any] | None:
    """Return the response template that HuggingFace knows for a type of model; None if it knows none."""
    try:
        from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
    except ImportError:
        return None
    return next((template for types, template in _RESPONSE_TEMPLATE_FALLBACKS.items() if model_type in types), None)
