"""What HuggingFace's vision encoders derive from ``grid_thw``, computed before their forward, and their attention.

| what | for | without it | ends when |
| --- | --- | --- | --- |
| ``transformers.vision_utils`` (from 5.17 on, or earlier), whose results a forward takes as arguments of their own | \
encoders that are compiled once for all sizes | HuggingFace's encoder runs | a processor returns them |
| ``"flash" in config._attn_implementation``, by which all images are handed over with their starts in one call | \
attention as one op | lengths are read on the host, and images attended to one by one | attention functions say so |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import ModelOutput
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

SEGMENTS = "compiled_llm_flash_segments"
"""The name of an attention implementation to which encoders hand over all images with their starts."""


class _PatchEmbedding(nn.Module):
    proj: nn.Conv3d


class VisionEncoder(nn.Module):
    """A Qwen-VL's vision tower, for type checkers; Qwen2.5-VL's alone has windows, Qwen3-VL's learned positions."""

    config: PretrainedConfig
    dtype: torch.dtype
    patch_embed: _PatchEmbedding
    spatial_merge_size: int
    window_size: int
    patch_size: int
    num_grid_per_side: int
    interpolation_mode: str
    interpolation_align_corners: bool


class ImageModel(nn.Module):
    """A model that reads images, or what it is without its head, for type checkers; ``visual`` is of the latter."""

    config: PretrainedConfig
    visual: VisionEncoder
    get_image_features: Callable[..., ModelOutput]
    prepare_inputs_for_generation: Callable[..., dict[str, Any]]


def of_grid(encoder: VisionEncoder, grid: Tensor) -> dict[str, Tensor]:
    """Return what an encoder's forward would derive from a grid ``[N, 3]`` on the CPU, by its arguments' names."""
    merged = encoder.spatial_merge_size
    read = {
        "position_ids": get_vision_position_ids(grid, merged),
        "cu_seqlens": get_vision_cu_seqlens(grid),
    }
    if hasattr(encoder, "interpolation_mode"):  # Qwen3-VL's learned positions
        read["interp_indices"], read["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=encoder.num_grid_per_side,
            mode=encoder.interpolation_mode,
            align_corners=encoder.interpolation_align_corners,
            spatial_merge_size=merged,
        )
    if window_patches(encoder):
        read["window_index"], read["cu_window_seqlens"] = get_vision_window_index(
            grid, spatial_merge_size=merged, window_size=encoder.window_size, patch_size=encoder.patch_size
        )
    return read


def patch_width(config: PretrainedConfig) -> int:
    """Return how many numbers a patch has, by an encoder's config."""
    width: int = config.temporal_patch_size * config.patch_size**2 * getattr(config, "in_channels", 3)
    return width


def window_patches(encoder: VisionEncoder) -> int:
    """Return how many patches a window has at most, in which layers of Qwen2.5-VL's attend; 0 without windows."""
    if not hasattr(encoder, "window_size"):
        return 0
    side = encoder.window_size // encoder.spatial_merge_size // encoder.patch_size * encoder.spatial_merge_size
    return side * side


def output_of(encoder: VisionEncoder, features: Sequence[Tensor]) -> BaseModelOutputWithPooling:
    """Return what an encoder's forward would return with features ``[T, C]``: its own, then those of other layers."""
    module = sys.modules[type(encoder).__module__]
    own, *others = features
    kind = getattr(module, "BaseModelOutputWithDeepstackFeatures", None)
    if kind is None:
        return BaseModelOutputWithPooling(pooler_output=own)
    output: BaseModelOutputWithPooling = kind(pooler_output=own, deepstack_features=others)
    return output
