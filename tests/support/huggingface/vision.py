"""A tiny random vision-language model of each family, what its processor would make of images, and its twin."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from support.huggingface.families import LATENTS, ROUTED, TINY

IMAGE, VIDEO, START, END = 120, 121, 122, 123
HEADS = {**TINY, "head_dim": 16}
EYES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = {**EYES, "image_size": 16, "patch_size": 8}
PATCHES = {
    "patch_size": 4,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "text_config": {**HEADS, "sliding_window": 8, "query_pre_attn_scalar": 16},
        "vision_config": SMALL,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
        "mm_tokens_per_image": 4,
    },
    "Qwen2VL": {
        "text_config": {**TINY, **AXES},
        "vision_config": {**PATCHES, "depth": 1, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        **TOKENS,
    },
    "Qwen2_5_VL": {
        "text_config": {**TINY, **AXES},
        "vision_config": {**PATCHES, "depth": 1, "window_size": 8, "fullatt_block_indexes": [0]},
        **TOKENS,
    },
    "Qwen3VL": {
        "text_config": {**HEADS, **AXES},
        "vision_config": {**PATCHES, "depth": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **TOKENS,
    },
    "Glm4v": {
        "text_config": {**HEADS, **AXES},
        "vision_config": {**PATCHES, "depth": 1, "image_size": 16},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "image_start_token_id": START,
        "image_end_token_id": END,
        "video_start_token_id": 124,
        "video_end_token_id": 125,
    },
    "Llava": {
        "text_config": {"model_type": "llama", **HEADS},
        "vision_config": {"model_type": "clip_vision_model", **SMALL},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
    },
    "LlavaOnevision": {
        "text_config": {"model_type": "qwen2", **TINY},
        "vision_config": {"model_type": "siglip_vision_model", **SMALL},
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "vision_feature_layer": -1,
    },
    "Mistral3": {
        "text_config": {"model_type": "mistral", **HEADS, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **EYES, "image_size": 32, "patch_size": 8},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
    },
    "InternVL": {
        "text_config": {"model_type": "qwen2", **TINY},
        "vision_config": {**EYES, "image_size": [16, 16], "patch_size": [8, 8]},
        "image_token_id": IMAGE,
        "downsample_ratio": 0.5,
        "vision_feature_layer": -1,
    },
    "Idefics3": {
        "text_config": {"model_type": "llama", **HEADS},
        "vision_config": SMALL,
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "pad_token_id": 0,
    },
    "Kimi_K25": {
        "text_config": {"model_type": "kimi_k2", **TINY, **LATENTS, **ROUTED},
        "vision_config": EYES,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
        "projection_hidden_size": 64,
        "tie_word_embeddings": False,
    },
    "AyaVision": {
        "text_config": {"model_type": "cohere2", **HEADS, "sliding_window": 8},
        "vision_config": {"model_type": "siglip_vision_model", **SMALL},
        "image_token_index": IMAGE,
    },
}
SEEING = ["Gemma3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v", "Llava", "Mistral3", "InternVL"]
"""Those that tests show images, too."""


def make(family: str, seed: int = 0, **text: Any) -> PreTrainedModel:
    """A tiny model with random weights; ``text`` overrides settings of the part that reads text."""
    settings = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(
        **{**settings, "text_config": {**settings["text_config"], **text}}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()


def with_images(family: str, seed: int = 0, right: bool = False) -> dict[str, Tensor]:
    """What a processor makes of three prompts with one image, none and two, padded on the left or on the right."""
    generator = torch.Generator().manual_seed(seed)
    image = [START, *[IMAGE] * (1 if family == "InternVL" else 4), END]
    texts = [torch.randint(3, 100, (count,), generator=generator).tolist() for count in (3, 9, 2)]
    rows = [[5, 6, *image * images, *text] for images, text in zip((1, 0, 2), texts, strict=True)]
    width = max(map(len, rows))
    padding = [[0] * (width - len(row)) for row in rows]
    both = [(row, pads) if right else (pads, row) for row, pads in zip(rows, padding, strict=True)]
    ids = torch.tensor([first + second for first, second in both])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    return {**inputs, **_pixels(family, generator), **_types(family, (ids == IMAGE).long())}


def _pixels(family: str, generator: torch.Generator) -> dict[str, Tensor]:
    if family.startswith(("Qwen", "Glm")):
        patches = torch.randn(3 * 16, 3 * 2 * 4 * 4, generator=generator)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]] * 3)}
    if family == "Mistral3":
        sizes = torch.tensor([[32, 32]] * 3)
        return {"pixel_values": torch.randn(3, 3, 32, 32, generator=generator), "image_sizes": sizes}
    return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}


def _types(family: str, types: Tensor) -> dict[str, Tensor]:
    if family.startswith(("Qwen", "Glm")):
        return {"mm_token_type_ids": types}
    return {"token_type_ids": types} if family == "Gemma3" else {}


def types_of_text(family: str, input_ids: Tensor) -> dict[str, Tensor]:
    """What a processor adds to text alone: types that mark no image."""
    return _types(family, torch.zeros_like(input_ids))
