"""Outputs of a call besides tokens, logits and a cache, by a part that can be taken out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compiled_llm.features import needed
from compiled_llm.model.traced.hooks import TracedHooks


def more_outputs(asked: bool | int | Sequence[int] | None, hooks: TracedHooks) -> Any:
    """Return what ``output_hidden_states`` and the hooks ask for; None for nothing, ValueError if it is not there."""
    return needed("hidden_states", "huggingface").WantedOutputs.of(asked, hooks) if asked or hooks else None
