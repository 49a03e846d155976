"""Each image is read by the processor before the next one is decoded, and comes out as it would with the others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support.huggingface.word_processor import image_processor, painted, qwen_processor

SIZES = ((90, 60), (50, 120), (300, 200))
PROCESSORS = ("CLIP", "Gemma3", "GotOcr2", "Idefics3", "LlavaNext", "LlavaOnevision", "Pixtral", "Qwen2VL")
TOGETHER = {("LlavaOnevision", True), ("Pixtral", False), ("Pixtral", True)}
"""Processors of which an image comes out otherwise beside others, by whether images are nested."""


class Decoding:
    """Deferred images, how many of those that were decoded are alive, and in which turns they were."""

    def __init__(self, images: list[Image.Image]) -> None:
        from compiled_llm.server.images.deferred_image import DeferredImage  # a part that can be taken out
        from compiled_llm.server.images.turns import Asker, Turns

        self.most = self.alive = 0
        self.turns: list[int] = []
        decoding = self

        class Noted(Turns):
            @contextmanager
            def turn(self, asker: Asker, pixels: int) -> Iterator[None]:
                decoding.turns.append(pixels)
                with super().turn(asker, pixels):
                    yield

        self.order = Noted()
        asker = Asker()
        self.images = [DeferredImage(self._decode(image), image.width * image.height, asker) for image in images]

    def _decode(self, image: Image.Image) -> Callable[[], Image.Image]:
        def decode() -> Image.Image:
            own = image.copy()
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(own, self._end)
            return own

        return decode

    def _end(self) -> None:
        self.alive -= 1


@pytest.mark.core
@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_outputs_of_one_each_are_those_of_all_together(name, nested):
    from compiled_llm.server.images.one_by_one import reading_one_by_one

    try:
        plain = image_processor(name)
    except ImportError as error:
        pytest.skip(str(error).strip().splitlines()[0])
    images = [painted(number, *size) for number, size in enumerate(SIZES)]
    decoding = Decoding(images)
    own = reading_one_by_one(type("Processor", (), {"image_processor": plain})(), decoding.order).image_processor

    def made(processor: Any, given: list[Any]) -> dict[str, Any]:
        return dict(processor([given] if nested else given, return_tensors="pt"))

    theirs, ours = made(plain, images), made(own, decoding.images)
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value) if isinstance(value, torch.Tensor) else ours[key] == value
    apart = (name, nested) not in TOGETHER
    assert decoding.turns == ([w * h for w, h in SIZES] if apart else [sum(w * h for w, h in SIZES)])
    assert decoding.most == (1 if apart else 3)
    assert own.size == plain.size, "all else is the processor's own"


def test_a_whole_processor_holds_one_image_at_a_time():
    from compiled_llm.engine.images.inputs import inputs_of_text
    from compiled_llm.server.images.one_by_one import reading_one_by_one

    images = [painted(number, 200, 200) for number in range(5)]
    text = "w1 " + "<|vision_start|><|image_pad|><|vision_end|> w2 " * 5
    decoding = Decoding(images)
    ours = inputs_of_text(text, decoding.images, reading_one_by_one(qwen_processor(), decoding.order))
    theirs = qwen_processor()(text=[text], images=images, return_tensors="pt")
    assert decoding.most == 1
    assert all(torch.equal(ours[name], theirs[name]) for name in ("input_ids", "pixel_values", "image_grid_thw"))


def test_images_that_are_read_together_are_bounded_together(monkeypatch):
    from compiled_llm.engine.images.image_files import UnreadError
    from compiled_llm.server.images import one_by_one

    monkeypatch.setattr(one_by_one, "MOST_IMAGE_PIXELS", 3000)
    decoding = Decoding([painted(number, 40, 50) for number in range(2)])
    processor = type("Processor", (), {"image_processor": image_processor("Pixtral")})()
    own = one_by_one.reading_one_by_one(processor, decoding.order).image_processor
    with pytest.raises(UnreadError) as caught:
        own(decoding.images)
    assert "its images have 4,000 pixels, and the model's processor reads them all together" in str(
        caught.value.__cause__
    )
    assert decoding.most == 0


def test_whoever_looks_at_a_deferred_image_itself_sees_it():
    (image,) = Decoding([painted(1, 30, 20)]).images
    assert isinstance(image, Image.Image)
    assert (image.size, image.mode) == ((30, 20), "RGB")
    (image,) = Decoding([painted(1, 30, 20)]).images
    assert np.array_equal(np.asarray(image), np.asarray(painted(1, 30, 20)))
    (image,) = Decoding([painted(1, 30, 20)]).images
    assert np.array_equal(np.asarray(image.convert("L")), np.asarray(painted(1, 30, 20).convert("L")))
