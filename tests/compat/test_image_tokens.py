"""How many tokens images have is known by their sizes, before a processor reads them."""

from __future__ import annotations

import pytest

from compiled_llm.compat.images.image_tokens import image_tokens
from support.huggingface.vision import IMAGE
from support.huggingface.word_processor import painted, qwen_processor


@pytest.mark.core
def test_they_are_those_that_the_processor_makes():
    sizes = [(40, 24), (300, 200), (64, 64)]
    images = [painted(number, *size) for number, size in enumerate(sizes)]
    made = qwen_processor()(text=["<|image_pad|>" * 3], images=images, return_tensors="pt")["input_ids"]
    assert image_tokens(qwen_processor(), sizes) == int((made == IMAGE).sum())
    assert image_tokens(qwen_processor(), [(300, 200)]) == image_tokens(qwen_processor(), [(200, 300)])


def test_nothing_is_said_of_what_it_cannot_count():
    assert image_tokens(qwen_processor(), [(1_000_000, 1)]) is None
    assert image_tokens(object(), [(40, 24)]) is None
