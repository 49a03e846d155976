"""Why HuggingFace's own forward has to run for a model as it is, whatever the call."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedConfig

from compiled_llm.compat.torch.modes import observer_of_operations
from compiled_llm.execution.reporting.slow_paths import Reason, SlowPath
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.version.model_version import Placement

UNSERVED_OUTPUTS: tuple[SlowPath, ...] = ("output_attentions", "output_router_logits")
"""Outputs of layers that only HuggingFace's own forward gives; the model computes them if its config says so."""
OTHER_OUTPUTS: tuple[SlowPath, ...] = ("output_hidden_states", *UNSERVED_OUTPUTS)
"""Outputs that only HuggingFace's own forward returns in ``generate``."""


def asked_by_config(config: PreTrainedConfig) -> Iterator[Reason]:
    """Yield the outputs that a config asks of each forward, and which keep ``generate`` on HuggingFace's."""
    yield from (Reason(name) for name in OTHER_OUTPUTS if getattr(config, name, False))


def inner_reasons(facts: ModelFacts, placement: Placement | None = None) -> Iterator[Reason]:
    """Yield why HuggingFace's own modules have to run: hooks look into them, they mix tokens, or they train."""
    # Or they attend by a function of the user's, or see other tokens than pages can serve.
    if (observer := observer_of_operations()) is not None:
        yield Reason("observed", observer)
    hooked, mixing, training = facts.version.obstacles(placement)
    if hooked is not None:
        yield Reason("inner_hooks", hooked)
    if mixing is not None:
        yield Reason("mixed_tokens", mixing)
    if facts.refused is not None:
        yield Reason("cannot_run", str(facts.refused))
    if (name := facts.replaced_attention()) is not None:
        yield Reason("attn_implementation", name)
    if training is not None:
        yield Reason("gradient_checkpointing" if training.checkpoints else "training", str(training))
