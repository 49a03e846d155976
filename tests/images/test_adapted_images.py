"""Images for models with LoRA adapters, in the layers that read text and in the encoder: PEFT's tokens."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from compiled_llm.engine.engine import Engine
from support.engine.tiny_engines import PATIENCE, greedy
from support.huggingface.vision import make
from support.images import Part, SampleImage, alone, prompt_of, seeing
from support.parity import assert_account_is_empty

CAT, WIDE = SampleImage(1), SampleImage(3, wide=True)
PROMPTS: list[tuple[Part, ...]] = [(5, CAT, 7), (9, 8, WIDE, 7, CAT, 6)]
OF_TEXT, OF_BOTH = ["q_proj", "down_proj"], "all-linear"


def adapted(model: Any, targets: Any) -> Any:
    """With two adapters, of which the first acts."""
    config = LoraConfig(r=4, lora_alpha=64, init_lora_weights=False, target_modules=targets)
    torch.manual_seed(0)
    with_adapters = get_peft_model(model, config, "first")
    with_adapters.add_adapter("second", config)
    return with_adapters.eval()


def answers(engine: Engine, family: str, patience: float = PATIENCE) -> list[list[int]]:
    handles = [engine.submit(prompt_of(family, *parts), greedy(9)) for parts in PROMPTS]
    return [list(handle.result(patience).outputs[0].token_ids) for handle in handles]


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    ("family", "targets", "in_steps"),
    [("Qwen3VL", OF_TEXT, True), ("Qwen2_5_VL", OF_BOTH, True), ("Qwen3VL", OF_BOTH, False)],
)
def test_answers_to_images_are_pefts(family, targets, in_steps, seed, caplog):
    model, plain = seeing(family, seed=seed, prefill_tokens=16), make(family, seed)
    ours, theirs = adapted(model, targets), adapted(plain, targets)
    base = alone(make(family, seed), prompt_of(family, *PROMPTS[0]), 9)
    with Engine(model, images_in_steps=in_steps) as engine, caplog.at_level(logging.WARNING, "compiled_llm"):
        for name in ("first", "second", "first"):
            for own in (ours, theirs):
                own.set_adapter(name)
            expected = [alone(plain, prompt_of(family, *parts), 9) for parts in PROMPTS]
            assert expected[0] != base
            assert answers(engine, family) == expected, name
        with ours.disable_adapter():
            assert answers(engine, family)[0] == base
    slow = model.compiled.stats().slow_paths
    assert slow == ({"encoder": 8} if in_steps and targets == OF_BOTH else {})
    assert len([record for record in caplog.records if "own encoder" in record.getMessage()]) == len(slow)
    assert_account_is_empty(model)


@pytest.mark.parametrize("targets", [OF_TEXT, OF_BOTH])
def test_generate_gives_pefts_tokens(targets, seed):
    model, plain = seeing("Qwen3VL", seed=seed, images_in_steps=True), make("Qwen3VL", seed)
    given = prompt_of("Qwen3VL", *PROMPTS[1])
    assert alone(model, given, 9) == alone(plain, given, 9)
    for own in (model, plain):
        adapted(own, targets).set_adapter("second")
    assert alone(model, given, 9) == alone(plain, given, 9)
    assert model.compiled.stats().slow_paths == ({"encoder": 1} if targets == OF_BOTH else {})


@pytest.mark.whole
def test_a_switch_to_an_adapter_of_the_same_shapes_compiles_nothing(seed):
    model, plain = seeing("Qwen3VL", seed=seed, mode="cuda-graphs", eager_first=False), make("Qwen3VL", seed)
    ours, theirs = adapted(model, OF_TEXT), adapted(plain, OF_TEXT)
    with Engine(model, processor=object(), images_in_steps=True) as engine:
        engine.warmup([1, 2])
        before = model.compiled.stats().graphs
        for name in ("first", "second", "first"):
            for own in (ours, theirs):
                own.set_adapter(name)
            expected = [alone(plain, prompt_of("Qwen3VL", *parts), 9) for parts in PROMPTS]
            assert answers(engine, "Qwen3VL", 600) == expected
    stats = model.compiled.stats()
    assert (stats.graphs, stats.recompiles, stats.graph_breaks, stats.slow_paths) == (before, 0, 0, {})
