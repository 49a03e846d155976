"""What pages of fp8 cost in accuracy, on real weights: those of the demo model, over pages of the manual."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm.commands.loading.load import load
from support.docs.pages import DOCS

TOKENS, MEASURED, JUDGED = 512, 4, 12
"""Tokens of each page, and how many pages; of so many tokens the quotient is known to 0.2 %."""


@torch.no_grad()
def perplexity(model: Any, texts: list[list[int]]) -> float:
    """Over all tokens but the first of each text."""
    lost = 0.0
    for ids in texts:
        logits = model(torch.tensor([ids])).logits[0, :-1]
        lost += torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item()
    return math.exp(lost / sum(len(ids) - 1 for ids in texts))


@pytest.mark.slow
@pytest.mark.whole
def test_perplexity_is_at_most_a_hundredth_higher(demo_model_dir: Path) -> None:
    model, tokenizer = load(str(demo_model_dir), torch.float32, torch.device("cpu"))
    texts = [tokenizer(page.read_text()).input_ids for page in sorted(DOCS.rglob("*.md"))]
    texts = [ids[500 : 500 + TOKENS] for ids in texts if len(ids) >= 500 + TOKENS][: MEASURED + JUDGED]
    measured, judged = texts[:MEASURED], texts[MEASURED:]
    assert len(judged) == JUDGED
    plain = perplexity(model, judged)
    scales = compiled_llm.kv_scales(model, measured)
    options: dict[str, Any] = {"mode": "eager", "kv_memory": "1024 tokens", "progress": False}
    compiled_llm.wrap(model, kv_dtype="fp8_e4m3", kv_scales=scales, **options)
    rounded = perplexity(model, judged)
    print(f"{plain:.3f} -> {rounded:.3f}, {rounded / plain:.4f} times")
    assert model.compiled.stats().forward_calls == {"compiled": len(judged)}
    assert plain < 50
    assert plain != rounded
    assert rounded <= 1.01 * plain
    assert model.compiled.stats().kv_saturated < 1000
