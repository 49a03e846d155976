"""Qwen3-VL, whole: images by its processor, `AutoProcessor` if torchvision is there, in a chat into `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_llm
from support.huggingface.processors import noise_image, qwen3_vl, qwen3_vl_processor, said
from support.parity import FEW_PAGES, assert_account_is_empty, greedy

pytestmark = pytest.mark.core


def test_a_conversation_with_images_of_several_sizes(tmp_path: Path, seed: int) -> None:
    """None, one and two in a batch; then what was answered, and another image."""
    processor = qwen3_vl_processor(tmp_path)
    plain, wrapped = qwen3_vl(processor, seed), compiled_llm.wrap(qwen3_vl(processor, seed), mode="eager", **FEW_PAGES)

    def read(*chats: list[dict[str, Any]]) -> dict[str, Any]:
        asked: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "padding": True}
        return dict(processor.apply_chat_template([*chats], add_generation_prompt=True, **asked))

    images = [noise_image(width, height, seed + width) for width, height in ((32, 48), (48, 32), (24, 24), (64, 16))]
    chats = [[said("hi")], [said("what is it", images[0])], [said("which is larger", *images[1:3])]]
    inputs = read(*chats)
    assert len(inputs["image_grid_thw"]) == 3
    expected = greedy(plain, inputs, 9)
    torch.testing.assert_close(greedy(wrapped, inputs, 9), expected)
    torch.testing.assert_close(wrapped.generate(**inputs, max_new_tokens=9, do_sample=True, top_k=1), expected)
    torch.testing.assert_close(greedy(wrapped, inputs, 7, num_beams=2), greedy(plain, inputs, 7, num_beams=2))
    again = read([*chats[1], said("a cat", role="assistant"), said("and this", images[3])])
    assert len(again["image_grid_thw"]) == 2
    torch.testing.assert_close(greedy(wrapped, again, 9), greedy(plain, again, 9))
    assert wrapped.compiled.stats().generate_calls == {"fast loop": 3, "compiled forward": 1}
    assert_account_is_empty(wrapped)
