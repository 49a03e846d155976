"""Whether steps read the images of a prompt, in chunks beside other rows, or HuggingFace's forward computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compiled_llm.compat.images.vision_encoders import patch_width
from compiled_llm.config import WrapConfig
from compiled_llm.engine.images.encoder.compiled_encoder import CompiledEncoder, own_encoder
from compiled_llm.engine.images.prompt_encoder import PromptEncoder
from compiled_llm.engine.images.shown import nothing_shown
from compiled_llm.engine.images.shown_step import PROGRAM
from compiled_llm.execution.lifecycle.warmup import Report, quiet
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.prefill.packing import NO_ROWS
from compiled_llm.model.facts import ModelFacts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FAMILIES = frozenset(f"{name}ForConditionalGeneration" for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL"))


def steps_obstacle(encoder: PromptEncoder, model_runner: ModelRunner) -> str | None:
    """Return why steps do not read these images, or None; they are as a processor of the model makes them."""
    # Others would fail in a step for all rows of the launch.
    if (found := model_obstacle(model_runner.state.facts, model_runner.config)) is not None:
        return found
    config = model_runner.state.facts.model.config.vision_config
    return None if _well_formed(encoder, config) else "pixels and tokens are not as many as the model's config says"


def model_obstacle(facts: ModelFacts, config: WrapConfig) -> str | None:
    """Return why steps of a model read no images, or None."""
    kind = facts.model_class
    if kind.__name__ not in _FAMILIES or not kind.__module__.startswith("transformers.models."):
        return f"steps read no images of {kind.__name__}"
    # Hooks are traced into programs of text alone, and taps are told ids. Artifacts have no such program; and
    # where answers run uncompiled at first, others would wait for it.
    if facts.hooks or facts.taps:
        return "hooks are traced, and taps watch, in steps of text alone"
    if config.artifacts is not None:
        return "artifacts have no steps that read images"
    if config.eager_first_on(facts.model.device.type):
        return "answers run uncompiled at first (eager_first)"
    return None


def prepare(model_runner: ModelRunner, report: Report = quiet) -> None:
    """Compile, and on CUDA capture, the prefill with images and the encoder, if steps read images of the model."""
    facts, thread, prefill = model_runner.state.facts, model_runner.thread, model_runner.prefill
    if model_obstacle(facts, model_runner.config) is not None:
        return
    report("preparing prompts with images")
    if (encoder := own_encoder(facts.model, model_runner)) is not None:
        thread.call(_prepare_encoder, encoder, facts)
    thread.call(prefill.launches.make_ready, NO_ROWS._replace(extra=nothing_shown(model_runner, facts)))
    thread.call(prefill.launches.capture_anchors, PROGRAM.name)  # those that launches since have made room for, too
    model_runner.prepared[PROGRAM.name] = prepare


def _prepare_encoder(encoder: CompiledEncoder, facts: ModelFacts) -> None:
    with torch.no_grad():
        encoder.prepare(facts.model.model.visual)


def _well_formed(encoder: PromptEncoder, config: PretrainedConfig) -> bool:
    """Whether pixels and tokens of all images are as many as the model's config says."""
    if encoder.patches is None:
        return False
    pixels, merged = encoder.pixels["pixel_values"], config.spatial_merge_size**2
    counts = zip(encoder.patches, encoder.tokens, strict=True)
    return pixels.shape[1:] == (patch_width(config),) and all(patches == merged * tokens for patches, tokens in counts)
