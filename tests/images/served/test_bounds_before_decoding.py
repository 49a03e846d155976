"""What a processor would make too large is refused by its header, and by its true size if the header has lied."""

from __future__ import annotations

from typing import Any

import pytest

from compiled_llm.protocol.messages import ImagePrompt
from support.huggingface.word_processor import image_processor
from support.server.images import png

SAID = "of which the model's processor makes 1,008,000 x 336, and at most 33,554,432 are made"


class Reader:
    """A reader of LLaVA's images whose decoder finds an image of another size than the header says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, found: tuple[int, int]) -> None:
        from compiled_llm.server.images.decoder_process import DecoderProcess  # a part that can be taken out
        from compiled_llm.server.images.messages import Decoded
        from compiled_llm.server.images.reader import ImageReader

        self.asked: list[int] = []

        def decoded(process: DecoderProcess, file: bytes, pixels: int, *arguments: Any) -> Decoded:
            self.asked.append(pixels)
            return Decoded(*found, "RGB", bytes(3 * found[0] * found[1]))

        monkeypatch.setattr(DecoderProcess, "__init__", lambda process: None)
        monkeypatch.setattr(DecoderProcess, "decoded", decoded)
        self._reader = ImageReader(Processor(image_processor("CLIP", size={"shortest_edge": 336}, crop_size=336)))

    def inputs(self, *files: bytes) -> Any:
        return self._reader.inputs(ImagePrompt("w1", [*files], 2**25), 99, lambda: True)


class Processor:
    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor

    def __call__(self, images: Any, **options: Any) -> Any:
        return self.image_processor(images, return_tensors="pt")


def test_by_its_header(monkeypatch):
    reader = Reader(monkeypatch, (8, 8))
    with pytest.raises(ValueError, match=rf"^images\[1\]: has 3,000 x 1 pixels, {SAID}"):
        reader.inputs(png(8, 8), png(3000, 1))
    assert reader.asked == []


def test_by_its_size(monkeypatch):
    reader = Reader(monkeypatch, (1, 3000))
    with pytest.raises(ValueError, match=rf"^images\[0\]: has 1 x 3,000 pixels, {SAID}"):
        reader.inputs(png(100, 30))
    assert reader.asked == [3000], "no more pixels are decoded than the header says"


def test_all_of_a_request_together_as_they_are_made(monkeypatch):
    reader = Reader(monkeypatch, (8, 8))
    with pytest.raises(ValueError, match="prompt: its images have 301,056,000 pixels; at most 268,435,456 are decoded"):
        reader.inputs(*[png(2400, 9)] * 10)
    assert reader.asked == []


def test_what_is_not_too_large_is_read(monkeypatch):
    reader = Reader(monkeypatch, (90, 100))
    assert reader.inputs(png(100, 90))["pixel_values"].shape == (1, 3, 336, 336)
    assert reader.asked == [9000]
