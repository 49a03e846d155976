"""Prompts with images: TRL gives their tokens and the images, and the engine has the trainer's processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.huggingface.processors import noise_image, qwen3_vl, qwen3_vl_processor
from support.rollouts import by_engine, ratios_of, trained

CLOSE = 1e-4


@pytest.fixture
def processor(tmp_path: Path) -> Any:
    return qwen3_vl_processor(tmp_path / "processor")


def model(processor: Any) -> Any:
    seeing = qwen3_vl(processor, 0)
    seeing.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    return seeing


def options(processor: Any, steps: int, **others: Any) -> dict[str, Any]:
    shown = [noise_image(16, 24, 1), noise_image(32, 16, 2)]
    prompts = [
        {"prompt": [{"role": "user", "content": text}], "image": image}
        for text, image in zip(("abc", "hello you"), shown, strict=True)
    ]
    return {"steps": steps, "prompts": prompts, "processing_class": processor, **others}


def test_rollouts_have_the_log_probabilities_of_the_trainer(processor: Any, tmp_path: Path) -> None:
    given = options(processor, 4, logprobs="raw_logprobs")
    _, run, engine, calls = by_engine(tmp_path, model(processor), processor=processor, **given)
    engine.close()
    image = processor.image_token_id
    assert all(image in output.prompt_token_ids and image not in output.token_ids for call in calls for output in call)
    assert max(run.differences) < CLOSE
    assert all(abs(ratio - 1) < 10 * CLOSE for ratio in ratios_of(run))


def test_greedy_rollouts_are_those_of_an_unwrapped_model(processor: Any, tmp_path: Path) -> None:
    given = options(processor, 4, top_k=1, entropy_coef=0.05)
    _, run, engine, _ = by_engine(tmp_path, model(processor), processor=processor, **given)
    engine.close()
    assert run.answers == trained(model(processor), tmp_path, **given).answers
