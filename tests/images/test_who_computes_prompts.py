"""Steps compute prompts with images unless somebody says otherwise: where CUDA graphs are captured, and they can."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from compiled_llm.config import WrapConfig
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.images.shown_step import PROGRAM
from support.engine.tiny_engines import PATIENCE, greedy, wrapped
from support.huggingface.vision import with_images
from support.images import SampleImage, answer, prompt_of, seeing
from support.parity import greedy as generated


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("cuda", {}, True),
        ("cuda", {"mode": "piecewise"}, False),
        ("cuda", {"mode": "eager"}, False),
        ("cpu", {}, False),
        ("cpu", {"images_in_steps": True}, True),
        ("cuda", {"images_in_steps": False}, False),
    ],
)
def test_unless_asked_steps_do_where_they_are_captured(device, options, expected):
    assert WrapConfig(**options).images_in_steps_on(device) is expected


def test_none_but_true_false_and_none_is_taken():
    with pytest.raises(ValueError, match="images_in_steps='auto': must be True, False or None"):
        WrapConfig(images_in_steps="auto")


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are wrapped to run uncompiled on a CPU go by what is said of captured steps on CUDA."""
    said = WrapConfig.images_in_steps_on
    monkeypatch.setattr(
        WrapConfig, "images_in_steps_on", lambda config, device: said(replace(config, mode="cuda-graphs"), "cuda")
    )


@pytest.mark.parametrize("asked", [None, False])
def test_engines_and_generate_go_by_what_the_device_says(as_on_cuda, asked, seed):
    model = seeing("Qwen3VL", images_in_steps=asked)
    generated(model, with_images("Qwen3VL", seed), 2)
    by_generate = launches(model)
    with Engine(model) as engine:
        parts = (5, SampleImage(1), 7)
        output = engine.submit(prompt_of("Qwen3VL", *parts), greedy(4)).result(PATIENCE)
        assert output.outputs[0].token_ids == answer("Qwen3VL", parts, 4)
    assert [by_generate > 0, launches(model) > by_generate] == [asked is None] * 2


def launches(model: PreTrainedModel) -> int:
    used: int = model.compiled.model_runner().graph_manager.events.used[PROGRAM.name]
    return used


def test_images_of_other_models_are_counted_and_the_log_says_so_once(as_on_cuda, caplog):
    model = seeing("Llava", images_in_steps=True)
    with Engine(model) as engine, caplog.at_level(logging.WARNING, "compiled_llm"):
        for number in range(3):
            parts = (5, SampleImage(number), 7)
            output = engine.submit(prompt_of("Llava", *parts), greedy(4)).result(PATIENCE)
            assert output.outputs[0].token_ids == answer("Llava", parts, 4)
    assert model.compiled.stats().slow_paths == {"prefill": 3}
    assert len([text for text in caplog.messages if "steps read no images of Llava" in text]) == 1


def test_a_warm_up_prepares_images_of_models_with_eyes_alone(as_on_cuda, monkeypatch):
    prepared: list[object] = []
    monkeypatch.setattr("compiled_llm.engine.images.part.prepare", lambda runner, report: prepared.append(runner))
    sees, text = seeing("Qwen3VL"), wrapped()
    sees.compiled.warmup(1)
    assert len(prepared) == 1
    text.compiled.warmup(1)
    with Engine(text) as engine:
        engine.warmup(1)
    assert len(prepared) == 1
