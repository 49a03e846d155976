"""A tiny random vision-language model of each family, what its processor would make of images, and its twin."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from support.huggingface.families import LATENTS, ROUTED, SHARED, TINY
from support.huggingface.recurrent_families import CONV, DELTA, ROUTED as SHARED_EXPERTS

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
TOKENS_OF_GLM = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": START,
    "image_end_token_id": END,
    "video_start_token_id": 124,
    "video_end_token_id": 125,
}
TOKENS_OF_GEMMA = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "boi_token_id": START,
    "eoi_token_id": END,
    "audio_token_id": 126,
    "boa_token_id": 124,
    "eoa_token_index": 125,
}
KNOWN: dict[str, dict[str, Any]] = {
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
        "vision_config": {**PATCHES, "depth": 2, "window_size": 16, "fullatt_block_indexes": [1]},
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
        **TOKENS_OF_GLM,
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
        "image_grid_pinpoints": [[16, 32], [32, 16]],
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
        "projection_hidden_size": 32,
        "tie_word_embeddings": False,
    },
    "AyaVision": {
        "text_config": {"model_type": "cohere2", **HEADS, "sliding_window": 8},
        "vision_config": {"model_type": "siglip_vision_model", **SMALL},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "LlavaNext": {
        "text_config": {"model_type": "llama", **HEADS},
        "vision_config": {"model_type": "clip_vision_model", **SMALL},
        "image_token_index": IMAGE,
        "vision_feature_layer": -1,
        "image_grid_pinpoints": [[16, 32], [32, 16]],
    },
    "VipLlava": {
        "text_config": {"model_type": "llama", **HEADS},
        "vision_config": {"model_type": "clip_vision_model", **SMALL},
        "image_token_index": IMAGE,
        "vision_feature_layers": [-1, -2],
        "vision_feature_layer": [-1, -2],
    },
    "Cohere2Vision": {
        "text_config": {"model_type": "cohere2", **HEADS, "sliding_window": 8},
        "vision_config": {"model_type": "siglip_vision_model", **SMALL},
        "image_token_id": IMAGE,
        "alignment_intermediate_size": 64,
    },
    "GotOcr2": {
        "text_config": {"model_type": "qwen2", **TINY},
        "vision_config": {
            **EYES,
            "image_size": 64,
            "patch_size": 8,
            "output_channels": 16,
            "mlp_dim": 48,
            "window_size": 4,
            "global_attn_indexes": [1],
            "initializer_range": 0.15,
        },
        "image_token_index": IMAGE,
    },
    "Qwen3VLMoe": {
        "text_config": {**HEADS, **AXES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "vision_config": {**PATCHES, "depth": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        **TOKENS,
    },
    "Glm46V": {
        "text_config": {"model_type": "glm4v_text", **HEADS, **AXES},
        "vision_config": {"model_type": "glm4v_vision", **PATCHES, "depth": 1, "image_size": 16},
        **TOKENS_OF_GLM,
    },
    "GlmOcr": {
        "text_config": {**HEADS, **AXES},
        "vision_config": {**PATCHES, "depth": 1, "image_size": 16},
        **TOKENS_OF_GLM,
    },
    "SmolVLM": {
        "text_config": {"model_type": "llama", **HEADS},
        "vision_config": SMALL,
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "pad_token_id": 0,
    },
    "Gemma4": {
        "text_config": {**SHARED, **HEADS, "num_hidden_layers": 4, "global_head_dim": 16},
        "vision_config": {
            **EYES,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "initializer_range": 0.15,
        },
        "audio_config": None,
        **TOKENS_OF_GEMMA,
    },
    "Gemma4Unified": {
        "text_config": {
            **HEADS,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "global_head_dim": 16,
        },
        "vision_config": {
            "patch_size": 2,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 32,
            "output_proj_dims": 32,
            "mm_posemb_size": 16,
        },
        "audio_config": None,
        **TOKENS_OF_GEMMA,
    },
    "PaliGemma": {
        "text_config": {"model_type": "gemma", **HEADS},
        "vision_config": {"model_type": "siglip_vision_model", **SMALL, "projection_dim": 64},
        "image_token_index": IMAGE,
        "projection_dim": 64,
    },
    "Qwen3_5": {
        "text_config": {**HEADS, **DELTA, **AXES, "num_hidden_layers": 3},
        "vision_config": {**PATCHES, "depth": 1, "num_position_embeddings": 16},
        **TOKENS,
    },
    "Qwen3_5Moe": {
        "text_config": {**HEADS, **DELTA, **SHARED_EXPERTS, **AXES, "num_hidden_layers": 3},
        "vision_config": {**PATCHES, "depth": 1, "num_position_embeddings": 16},
        **TOKENS,
    },
    "Lfm2Vl": {
        "text_config": {"model_type": "lfm2", **HEADS, **CONV, "num_hidden_layers": 3},
        "vision_config": {"model_type": "siglip2_vision_model", **EYES, "patch_size": 8, "num_patches": 16},
        "image_token_id": IMAGE,
        "projector_hidden_size": 48,
    },
}
FAMILIES = {
    family: settings for family, settings in KNOWN.items() if hasattr(transformers, f"{family}ForConditionalGeneration")
}
"""Those of the installed version."""
TOKENS_OF_AN_IMAGE = {
    **dict.fromkeys(("InternVL", "Idefics3", "SmolVLM", "Cohere2Vision", "AyaVision"), 1),
    **dict.fromkeys(("LlavaNext", "LlavaOnevision"), 14),
}
"""Where they are not four."""
BY_ROW = ("Idefics3", "SmolVLM")
"""Those whose processors give as many images to each row, black ones where it has fewer."""
BOTH_WAYS = ("PaliGemma",)
"""Those that see the tokens of each prompt both ways."""


def make(family: str, seed: int = 0, **text: Any) -> PreTrainedModel:
    """A tiny model with random weights; ``text`` overrides settings of the part that reads text."""
    settings = copy.deepcopy(FAMILIES[family])  # configs write into rope parameters, which several families share
    config = getattr(transformers, f"{family}Config")(
        **{**settings, "text_config": {**settings["text_config"], **text}}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
        with torch.no_grad():
            for weight in model.parameters():  # classes begin some projections of images as zeros, which show nothing
                if weight.dim() > 1 and not weight.any():
                    weight.normal_(0, 0.15)
    return model


def with_images(family: str, seed: int = 0, right: bool = False) -> dict[str, Tensor]:
    """What a processor makes of three prompts with one image, none and two, padded on the left or on the right."""
    generator = torch.Generator().manual_seed(seed)
    image = [START, *[IMAGE] * TOKENS_OF_AN_IMAGE.get(family, 4), END]
    texts = [torch.randint(3, 100, (count,), generator=generator).tolist() for count in (3, 9, 2)]
    rows = [[5, 6, *image * images, *text] for images, text in zip((1, 0, 2), texts, strict=True)]
    width = max(map(len, rows))
    padding = [[0] * (width - len(row)) for row in rows]
    both = [(row, pads) if right else (pads, row) for row, pads in zip(rows, padding, strict=True)]
    ids = torch.tensor([first + second for first, second in both])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    return {**inputs, **_pixels(family, generator), **_types(family, (ids == IMAGE).long())}


def _pixels(family: str, generator: torch.Generator) -> dict[str, Tensor]:
    """What processors make of three images of 16 by 16 pixels, the second two of them in one row."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    grids = {"image_grid_thw": torch.tensor([[1, 4, 4]] * 3)}
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="xy"), -1).reshape(1, 16, 2)
    match family:
        case _ if family.startswith(("Qwen", "Glm")):
            return {"pixel_values": normal(3 * 16, 3 * 2 * 4 * 4), **grids}
        case "Kimi_K25":
            return {"pixel_values": normal(3 * 16, 3, 14, 14), **grids}
        case "Mistral3":
            return {"pixel_values": normal(3, 3, 32, 32), "image_sizes": torch.tensor([[32, 32]] * 3)}
        case "LlavaNext" | "LlavaOnevision":
            return {"pixel_values": normal(3, 3, 3, 16, 16), "image_sizes": torch.tensor([[16, 32]] * 3)}
        case _ if family in BY_ROW:
            pixels = normal(3, 2, 3, 16, 16)
            pixels[0, 1] = pixels[1] = 0
            return {"pixel_values": pixels}
        case "GotOcr2":
            return {"pixel_values": normal(3, 3, 64, 64)}
        case "Gemma4":
            return {"pixel_values": normal(3, 16, 48).sigmoid(), "image_position_ids": places.expand(3, 16, 2)}
        case "Gemma4Unified":
            return {"pixel_values": normal(3, 4, 48), "image_position_ids": places[:, [0, 1, 4, 5]].expand(3, 4, 2)}
        case "Lfm2Vl":
            shapes = torch.tensor([[4, 4]] * 3)
            return {
                "pixel_values": normal(3, 16, 3 * 8 * 8),
                "pixel_attention_mask": torch.ones(3, 16, dtype=torch.long),
                "spatial_shapes": shapes,
            }
    return {"pixel_values": normal(3, 3, 16, 16)}


def _types(family: str, types: Tensor) -> dict[str, Tensor]:
    if family.startswith(("Qwen", "Glm", "Gemma4")):
        return {"mm_token_type_ids": types}
    if family == "PaliGemma":  # those of the prompt are 0, of images and of text
        return {"token_type_ids": torch.zeros_like(types)}
    return {"token_type_ids": types} if family == "Gemma3" else {}


def one_image(family: str, seed: int = 0) -> dict[str, Tensor]:
    """What a processor makes of one prompt with one image."""
    inputs = with_images(family, seed, right=True)
    shown = inputs["attention_mask"][0].bool()
    by_token = [name for name in inputs if name in ("input_ids", "attention_mask") or name.endswith("type_ids")]
    images = {name: value[: len(value) // 3] for name, value in inputs.items() if name not in by_token}
    if family in BY_ROW:
        images = {name: value[:, :1] for name, value in images.items()}
    return {name: inputs[name][:1, shown] for name in by_token} | images


def types_of_text(family: str, input_ids: Tensor) -> dict[str, Tensor]:
    """What a processor adds to text alone: types that mark no image."""
    return _types(family, torch.zeros_like(input_ids))
