"""Whether steps read the pictures of a prompt, in chunks beside other rows, or HuggingFace's forward computes it."""

from __future__ import annotations

from typing import Any

from compiled_llm.engine.images.prompt_encoder import PromptEncoder
from compiled_llm.engine.images.shown import nothing_shown
from compiled_llm.execution.model_runner import ModelRunner

_FAMILIES = frozenset(f"{name}ForConditionalGeneration" for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL"))


def reads(encoder: PromptEncoder, model_runner: ModelRunner) -> bool:
    """Return whether steps read these pictures, which are as a processor of the model makes them."""
    # Others would fail in a step for all rows of the launch.
    return can_read(model_runner) and _well_formed(encoder, model_runner.state.facts.model.config.vision_config)


def can_read(model_runner: ModelRunner) -> bool:
    """Return whether steps of a model read pictures."""
    facts, config = model_runner.state.facts, model_runner.config
    kind = facts.model_class
    if kind.__name__ not in _FAMILIES or not kind.__module__.startswith("transformers.models."):
        return False
    # Hooks are traced into programs of text alone, and pages are checked by ids. Artifacts have no such program; and
    # where answers run uncompiled at first, others would wait for it.
    compiled_later = config.artifacts is not None or config.eager_first_on(model_runner.device.type)
    return not (facts.hooks or model_runner.state.taps or compiled_later)


def prepare(model_runner: ModelRunner) -> None:
    """Compile the step that reads pictures, if there is one, in the model's executor."""
    if can_read(model_runner):
        nothing = nothing_shown(model_runner, model_runner.state.facts)
        model_runner.thread.call(model_runner.prefill.make_ready, brought=nothing)


def _well_formed(encoder: PromptEncoder, config: Any) -> bool:
    """Whether pixels and tokens of all pictures are as many as the model's config says."""
    if encoder.patches is None:
        return False
    pixels, merged = encoder.pixels["pixel_values"], config.spatial_merge_size**2
    width = config.temporal_patch_size * config.patch_size**2 * getattr(config, "in_channels", 3)
    counts = zip(encoder.patches, encoder.tokens, strict=True)
    return pixels.shape[1:] == (width,) and all(patches == merged * tokens for patches, tokens in counts)
