"""Prompts that HuggingFace's own forward computes before our decode steps: with images, or padded on the right.

Pages hold no masked tokens, and nothing is computed for them. HuggingFace's forward computes them as well: the text of
a row that is padded on the right continues from its padding, and caches of HuggingFace's keep them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from compiled_llm.execution.slow_paths import Reason
from compiled_llm.huggingface.current_call import copies
from compiled_llm.huggingface.other_inputs import one_a_token
from compiled_llm.model.layer_probe import Layer

OF_PREFILLS = frozenset(
    {
        *("mm_encoder_outputs", "mm_token_type_ids", "token_type_ids", "num_local_patches", "second_per_grid_ts"),
        *("pixel_values", "pixel_values_images", "pixel_values_videos", "high_res_pixel_values"),
        *("pixel_mask", "pixel_attention_mask", "image_sizes", "image_sizes_videos"),
        *("image_grid_thw", "video_grid_thw"),
    }
)
"""What a vision-language model reads of images and videos while it computes a prompt, and not afterwards."""


def prefill_reason(others: Sequence[str], inputs: Mapping[str, Any], known: int | None) -> Reason | None:
    """Return why HuggingFace's own forward has to compute the prompt, or None.

    Args:
        others: names of inputs beside tokens, mask, positions and cache.
        inputs: of the model, by name.
        known: how many columns the cache holds that the user gets back; None if it is not HuggingFace's.
    """
    if others:
        return Reason("prefill", f"the model is given {', '.join(others)}")
    mask = inputs.get("attention_mask")
    if mask is None:
        return None
    hidden = copies().of(mask) == 0
    if hidden[:, -1].any():
        return Reason("prefill", "prompts are padded on the right")
    if known is not None and hidden[:, known:].any():
        return Reason("prefill", "the cache has to hold masked tokens too")
    return None


def prefill_obstacle(
    model: PreTrainedModel, layers: Sequence[Layer], config: GenerationConfig, inputs: Mapping[str, Any], most: int
) -> bool:
    """Whether decode steps of ours cannot follow a prefill of HuggingFace's.

    Args:
        model: the model.
        layers: its layers.
        config: of the call.
        inputs: of the model, by name.
        most: how many columns the cache holds at the end.
    """
    positions = inputs.get("position_ids")
    if config.use_cache is False or config.prefill_chunk_size is not None or "inputs_embeds" in inputs:
        return True
    if positions is None or one_a_token(copies().of(positions)[..., -1:], model.config) is None:
        return True
    return windows_differ(layers, inputs, most)


def windows_differ(layers: Sequence[Layer], inputs: Mapping[str, Any], most: int) -> bool:
    """Whether a window over the columns of a row would see other tokens than one over those that are stored.

    Args:
        layers: of the model.
        inputs: of the model, a ``[B, C]`` mask among them that hides the columns that are not stored.
        most: how many columns there are at the end.
    """
    windows = [layer.window_left + 1 for layer in layers if layer.window_left >= 0]
    mask = inputs.get("attention_mask")
    if mask is None or not windows or most <= min(windows):
        return False
    shown = copies().of(mask).numpy() != 0
    return bool((shown.sum(axis=1) != shown.shape[1] - shown.argmax(axis=1)).any())
