"""Finds properties of a model itself that keep our loops from standing in for HuggingFace's, whatever the call."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel

from compiled_llm.execution.reporting.inner_reasons import asked_by_config, inner_reasons
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.huggingface.inspection.overrides import Overrides, forward_of_object, own_forward
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.traced.hooks import TracedHooks
from compiled_llm.model.version.model_version import ModelVersion, Placement
from compiled_llm.model.version.module_tree import has_hooks

SEEN_BOTH_WAYS = Reason("prefill", "the model sees their tokens both ways")


def forward_reasons(model: PreTrainedModel, facts: ModelFacts, placement: Placement | None) -> Iterator[Reason]:
    """Yield why the original forward has to run; ``placement`` if the version was just asked for it."""
    if (own := own_forward(model)) is not None:
        yield Reason("own_forward", own)
    yield from inner_reasons(facts, placement)
    yield from asked_by_config(model.config)


def check_hooks_run(call: str, hooks: TracedHooks, reason: Reason) -> None:
    """Raise ValueError if a call would run HuggingFace's own forward and leave traced hooks out."""
    if hooks:
        raise ValueError(
            f"{call}: {reason}; that takes HuggingFace's own forward, which does not run traced hooks; {reason.advice} "
            "Or remove the hooks (handle.remove())"
        )


def passed_over(model: PreTrainedModel, version: ModelVersion) -> list[str]:
    """Return what a trainer has left on a model that ``forward_reasons`` lets pass: where it is, and whose."""
    forward = forward_of_object(model)
    embeddings = version.hooked_embeddings()
    hooks = [f"{'.'.join(path)}: hooks that ask for gradients" for path in embeddings]
    return hooks if forward is None else [forward, *hooks]


def model_obstacle(
    model: PreTrainedModel, facts: ModelFacts, overrides: Overrides, placement: Placement | None
) -> Reason | None:
    """Return why our loops cannot run the model now, or None; ``placement`` as for ``forward_reasons``."""
    for reason in forward_reasons(model, facts, placement):
        return reason
    if facts.sees_prompts_both_ways:
        return SEEN_BOTH_WAYS
    if names := overrides.of(model):
        return Reason("overrides", ", ".join(names))
    return Reason("model_hooks") if has_hooks(model) else None
