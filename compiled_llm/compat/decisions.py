"""Typed decisions of transformers, new in 5.24; ``tests/compat/test_decisions.py`` tests it."""

# Public there are ``DecisionConfig``, ``Question``, ``label_token_ids``, ``DECISION_PROMPT`` and the sentinels of
# templates. ``DecisionConfig.prepare_inputs`` makes tensors, so it needs torch, which API servers go without; it writes
# its prompts with ``_compile_jinja_template`` and ``_get_template_variables`` of ``utils.chat_template_utils``, which
# are private, and so do we. If they go, decisions are refused as of an old version. Ends when transformers prepares
# prompts as lists of tokens.

from __future__ import annotations

from types import ModuleType
from typing import Any

OLDEST = "5.24"


class DecisionsMissingError(ImportError):
    """The installed transformers knows no decisions."""


def decisions_of_transformers() -> ModuleType:
    """Return the module of decisions' prompts and answers; DecisionsMissingError if this version has none."""
    import transformers

    try:
        from transformers.decision import template_utils

        return _checked(template_utils)
    except (ImportError, AttributeError):
        raise DecisionsMissingError(
            f"decisions need transformers {OLDEST} or newer, and {transformers.__version__} is installed: "
            f"pip install -U 'transformers>={OLDEST}'"
        ) from None


def _checked(module: ModuleType) -> ModuleType:
    for name in ("AddedToken", "DECISION_PROMPT", "MARK", "SPLIT", "Question", "label_token_ids"):
        getattr(module, name)
    return module


def decision_config(source: str | None) -> Any:
    """Return the ``DecisionConfig`` beside a model, with its template: the defaults if there are no such files."""
    decisions_of_transformers()
    from transformers.decision import DecisionConfig

    return DecisionConfig.from_pretrained(source or "")


def variables_of(template: str) -> frozenset[str]:
    """Return the variables that a template reads."""
    from transformers.utils.chat_template_utils import _get_template_variables

    return frozenset(_get_template_variables(template))


def written(template: str, **variables: object) -> str:
    """Return what a template writes of variables."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return str(_compile_jinja_template(template).render(**variables))
