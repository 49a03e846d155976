"""Prompts that HuggingFace's own forward computes before our decode steps: with images, or padded on the right."""

# Pages hold no masked tokens, and nothing is computed for them. HuggingFace's forward computes them as well: the text
# of a row that is padded on the right continues from its padding, and caches of HuggingFace's keep them.

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.huggingface.call.current_call import copies
from compiled_llm.huggingface.call.other_inputs import one_a_token

OF_PREFILLS = frozenset(
    {
        "mm_encoder_outputs",
        "mm_token_type_ids",
        "token_type_ids",
        "num_local_patches",
        "second_per_grid_ts",
        "pixel_values",
        "pixel_values_images",
        "pixel_values_videos",
        "high_res_pixel_values",
        "pixel_mask",
        "pixel_attention_mask",
        "image_sizes",
        "image_sizes_videos",
        "image_grid_thw",
        "video_grid_thw",
        "spatial_shapes",
        "batch_num_images",
        "image_position_ids",
        "video_position_ids",
    }
)
"""Inputs of images and videos that a vision-language model reads while it computes a prompt, and not afterwards."""


def prefill_reason(inputs: Mapping[str, Any], known: int | None) -> Reason | None:
    """Return why HuggingFace's own forward has to compute a prompt whose other inputs steps read, or None."""
    # ``known`` is how many columns the cache holds that the user gets back, None if it is not HuggingFace's.
    mask = inputs.get("attention_mask")
    if mask is None:
        return None
    shown = copies().of(mask)
    if not shown[:, -1].all():
        return Reason("prefill", "prompts are padded on the right")
    if known is not None and not shown[:, known:].all():
        return Reason("prefill", "the cache has to hold masked tokens too")
    return None


def prefill_obstacle(model: PreTrainedModel, config: GenerationConfig, inputs: Mapping[str, Any]) -> bool:
    """Whether our decode steps cannot follow HuggingFace's prefill."""
    positions = inputs.get("position_ids")
    if config.use_cache is False or config.prefill_chunk_size is not None or "inputs_embeds" in inputs:
        return True
    if positions is None:
        return "position_ids" in inspect.signature(type(model).forward).parameters
    return one_a_token(copies().of(positions)[..., -1:], model.config) is None
