"""A processor made from settings, of words and without videos, which need torchvision; and images for it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLProcessor

from support.huggingface.vision import END, IMAGE, START

WORDS = {f"w{number}": number for number in range(IMAGE)}
_SPECIAL = {
    "<|image_pad|>": IMAGE,
    "<|video_pad|>": 121,
    "<|vision_start|>": START,
    "<|vision_end|>": END,
    "<unk>": 124,
}
PIL_IMAGES = getattr(transformers, "Qwen2VLImageProcessorPil", transformers.Qwen2VLImageProcessor)
_CHAT = (
    "{% for message in messages %}w1 {% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %} w2 {% endfor %}"
    "{% if add_generation_prompt %}w3{% endif %}"
)


class WithoutVideos(Qwen3VLProcessor):
    """Qwen's processor, which makes no videos here: that needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None


def qwen_processor() -> Any:
    """A processor for the tiny models of Qwen, whose words are ``w0`` to ``w119``; 8 x 8 pixels are a token."""
    words = Tokenizer(models.WordLevel({**WORDS, **_SPECIAL}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    edges = {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", extra_special_tokens={**names, **edges}
    )
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    images = PIL_IMAGES(size={"shortest_edge": 64, "longest_edge": 4096}, **sizes)
    return WithoutVideos(image_processor=images, tokenizer=tokenizer, chat_template=_CHAT)


def image_processor(name: str, **options: Any) -> Any:
    """The image processor of a family, with its own settings but for some, which needs no torchvision."""
    return getattr(transformers, f"{name}ImageProcessorPil", getattr(transformers, f"{name}ImageProcessor"))(**options)


def painted(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    """An image of random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(colours)


def as_file(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image's file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()
