"""Real weights in four and eight bits answer the question of the first page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import compiled_llm
from support.huggingface.pairs import OPTIONS
from support.packed_layers import PACK, packed_model

LAYERS = 30 * 7


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("compressed-tensors, 4 bits with zeros", " Paris"),  # and goes on otherwise, as these weights do unpacked
        ("transformers, blocks", " Paris."),
        ("bitsandbytes, int8", " Paris."),
    ],
)
def test_smollm2_names_the_capital_of_france(name: str, answer: str, demo_model_dir: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32)
    format, pack = PACK[name]
    compiled_llm.wrap(packed_model(model, pack), **OPTIONS, packed=True)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :]).startswith(answer)
    assert model.compiled.stats().weights == {f"{format}: compiled_llm": LAYERS}
