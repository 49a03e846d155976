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
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

SEGMENTS = "compiled_llm_flash_segments"
"""The name of an attention implementation to which encoders hand over all images with their starts."""


def of_grid(encoder: Any, grid: Tensor) -> dict[str, Tensor]:
    """Return what an encoder's forward would derive from a grid ``[N, 3]`` on the CPU, by its arguments' names."""
    merged: int = encoder.spatial_merge_size
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


def window_patches(encoder: Any) -> int:
    """Return how many patches a window has at most, in which layers of Qwen2.5-VL's attend; 0 without windows."""
    if not hasattr(encoder, "window_size"):
        return 0
    side: int = encoder.window_size // encoder.spatial_merge_size // encoder.patch_size * encoder.spatial_merge_size
    return side * side


def output_of(encoder: object, features: Sequence[Tensor]) -> object:
    """Return what an encoder's forward would return with features ``[T, C]``: its own, then those of other layers."""
    module = sys.modules[type(encoder).__module__]
    own, *others = features
    kind: Any = getattr(module, "BaseModelOutputWithDeepstackFeatures", None)
    return (
        BaseModelOutputWithPooling(pooler_output=own)
        if kind is None
        else kind(pooler_output=own, deepstack_features=others)
    )
