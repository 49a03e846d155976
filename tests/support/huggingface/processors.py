"""A processor of Qwen3-VL, of letters and small images, as the hub would have it in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers import PreTrainedModel
from transformers.utils import is_torchvision_available

from support.huggingface.vision import make
from support.huggingface.word_processor import PIL_IMAGES, WithoutVideos
from support.tiny_tokenizer import tokenizer

SPECIAL = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }} {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %} {% endfor %}{% if add_generation_prompt %}a {% endif %}"
)
PATCHES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}


def qwen3_vl_processor(folder: Path) -> Any:
    """The one that `AutoProcessor` reads from a folder; that needs torchvision, without which it has no videos."""
    letters = tokenizer()
    letters.add_special_tokens({"additional_special_tokens": [*SPECIAL.values()]})
    letters.padding_side = "left"
    sizes: dict[str, Any] = {**PATCHES, "size": {"shortest_edge": 256, "longest_edge": 1024}}
    if not is_torchvision_available():
        return WithoutVideos(image_processor=PIL_IMAGES(**sizes), tokenizer=letters, chat_template=TEMPLATE)
    images = transformers.Qwen2VLImageProcessor(**sizes)
    videos = transformers.Qwen3VLVideoProcessor(**PATCHES)
    own = transformers.Qwen3VLProcessor(images, letters, videos, chat_template=TEMPLATE)
    own.save_pretrained(folder)
    return transformers.AutoProcessor.from_pretrained(folder)


def qwen3_vl(processor: Any, seed: int) -> PreTrainedModel:
    """A tiny model that has the processor's tokens."""
    model = make("Qwen3VL", seed)
    for name, token in SPECIAL.items():
        setattr(model.config, name, processor.tokenizer.convert_tokens_to_ids(token))
    return model


def noise_image(width: int, height: int, seed: int) -> Any:
    """An image of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def said(text: str, *images: Any, role: str = "user") -> dict[str, Any]:
    """A message of images, and text after them."""
    shown = [{"type": "image", "image": image} for image in images]
    return {"role": role, "content": [*shown, {"type": "text", "text": text}]}
