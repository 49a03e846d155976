"""What a call gets besides tokens, logits and a cache, from a part that can be taken out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from transformers import PreTrainedModel

from compiled_llm.execution.taps import part_in
from compiled_llm.model.traced_hooks import TracedHooks


class MoreOutputs(Protocol):
    """What is wanted; ``WantedOutputs`` says more."""

    def reading(self, *args: Any) -> AbstractContextManager[Callable[[], Any]]: ...
    def steps(self, call: Any) -> Any: ...
    def column_bytes(self, model: PreTrainedModel) -> int: ...


def more_outputs(asked: bool | int | Sequence[int] | None, hooks: TracedHooks) -> MoreOutputs | None:
    """Return what ``output_hidden_states`` and the hooks ask for; None for nothing, ValueError if it is not there."""
    if not (asked or hooks):
        return None
    wanted: MoreOutputs = part_in("huggingface", "hidden_states").of(asked, hooks)
    return wanted
