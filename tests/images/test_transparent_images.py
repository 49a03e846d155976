"""What is transparent reaches the processor as HuggingFace's own gets it, which blends it onto white."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from compiled_llm.engine.images.image_files import as_read_by, opened
from compiled_llm.engine.images.inputs import inputs_of
from support.huggingface.vision import IMAGE
from support.huggingface.word_processor import as_file, image_processor, painted, qwen_processor

PROCESSORS = ("CLIP", "Gemma3", "GotOcr2", "Llava", "LlavaNext", "Pixtral", "Qwen2VL", "Siglip")
RED = (255, 0, 0)


def transparent(mode: str) -> Image.Image:
    """An image with a hole, and with pixels that are half transparent where it has alpha."""
    image = painted(3, 40, 24).convert(mode)
    image.putalpha(Image.fromarray(np.resize(np.array([0, 120, 255], np.uint8), (24, 40))))
    return image


def palette() -> Image.Image:
    return painted(4, 40, 24).quantize(16)


def holed() -> Image.Image:
    """An image in RGB with a part in one colour."""
    image = painted(5, 40, 24)
    image.paste(RED, (4, 4, 20, 20))
    return image


FILES = {
    "RGBA": as_file(transparent("RGBA")),
    "LA": as_file(transparent("LA")),
    "WebP": as_file(transparent("RGBA"), "WEBP", lossless=True),
    "palette": as_file(palette(), transparency=3),
    "RGB with a colour": as_file(holed(), transparency=RED),
    "opaque": as_file(painted(6)),
}


@pytest.mark.core
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_makes_of_it_what_it_makes_of_pillow_s_own(name):
    processor = image_processor(name)
    for file in FILES.values():
        theirs = processor([Image.open(io.BytesIO(file))], return_tensors="pt")["pixel_values"]
        ours = processor([as_read_by(processor, opened(file))], return_tensors="pt")["pixel_values"]
        assert torch.equal(ours, theirs)


def test_for_a_processor_that_converts_nothing_it_is_blended_onto_white():
    image = as_read_by(image_processor("CLIP", do_convert_rgb=False), opened(FILES["RGBA"]))
    given = transparent("RGBA")
    alpha = np.asarray(given)[..., 3:] / 255
    expected = np.asarray(given)[..., :3] * alpha + 255 * (1 - alpha)
    assert image.mode == "RGB"
    assert np.abs(np.asarray(image) - expected).max() <= 1


@pytest.mark.parametrize("name", FILES)
def test_messages_and_dictionaries_have_the_processor_s_pixels(name):
    processor, image = qwen_processor(), Image.open(io.BytesIO(FILES[name]))
    text = "w5 <|vision_start|><|image_pad|><|vision_end|> w6"
    theirs = processor(text=[text], images=[image], return_tensors="pt")["pixel_values"]
    messages = [{"role": "user", "content": [{"type": "image", "image": FILES[name]}]}]
    for prompt in (messages, {"prompt": text, "multi_modal_data": {"image": image}}):
        assert torch.equal(inputs_of(prompt, processor, IMAGE)["pixel_values"], theirs)


def test_a_camera_s_file_with_a_second_image_is_taken_by_its_first():
    file = as_file(painted(1), "MPO", save_all=True, append_images=[painted(2)])
    assert Image.open(io.BytesIO(file)).format == "MPO"
    assert np.array_equal(opened(file), Image.open(io.BytesIO(file)).convert("RGB"))
