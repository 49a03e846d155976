"""An image is bounded by what the processor will make of it, before the processor runs."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from compiled_llm.engine.images.inputs import inputs_of
from compiled_llm.engine.images.scaling import largest_size
from support.huggingface.vision import IMAGE
from support.huggingface.word_processor import image_processor

LLAVA = {"size": {"shortest_edge": 336}, "crop_size": 336}


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "options", "size", "largest"),
    [
        ("CLIP", LLAVA, (3000, 1), (1_008_000, 336)),
        ("CLIP", LLAVA, (1, 3000), (1_008_000, 336)),
        ("CLIP", LLAVA, (400, 300), (448, 336)),
        ("CLIP", LLAVA, (4000, 3000), (4000, 3000)),
        ("CLIP", {**LLAVA, "do_resize": False}, (3000, 1), (3000, 1)),
        ("Llava", {**LLAVA, "do_pad": True}, (8000, 100), (8000, 8000)),
        ("Siglip", {"size": {"height": 224, "width": 224}}, (3000, 1), (3000, 1)),
        ("Qwen2VL", {}, (1000, 10), (1000, 10)),
        ("Pixtral", {}, (3000, 1), (3000, 1)),
    ],
    ids=str,
)
def test_the_largest_size_on_the_way(name, options, size, largest):
    assert largest_size(image_processor(name, **options), *size) == largest


def test_it_is_what_the_processor_makes():
    processor = image_processor("CLIP", size={"shortest_edge": 20}, do_center_crop=False)
    for size in ((50, 7), (7, 50), (33, 32), (20, 20)):
        made = processor([Image.new("RGB", size)], return_tensors="pt")["pixel_values"][0, 0].numel()
        assert abs(math.prod(largest_size(processor, *size)) - max(made, math.prod(size))) <= 20


class NeverAsked(SimpleNamespace):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("the processor was asked")

    apply_chat_template = __call__


def test_one_that_would_become_gigabytes_is_refused_before_the_processor_runs():
    processor = NeverAsked(image_processor=image_processor("CLIP", **LLAVA))
    image = Image.new("RGB", (3000, 1))
    said = "3,000 x 1 pixels, of which the model's processor makes 1,008,000 x 336, and at most 67,108,864 are made"
    with pytest.raises(ValueError, match=f"prompt: an image has {said}"):
        inputs_of({"prompt": "w1", "multi_modal_data": {"image": image}}, processor, IMAGE)
    with pytest.raises(ValueError, match=said):
        inputs_of([{"role": "user", "content": [{"type": "image", "image": image}]}], processor, IMAGE)
