"""Mixtures of experts on a GPU, in float32, where choices are not near ties: HuggingFace's tokens in every mode."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from transformers.integrations import moe

import compiled_llm
from compiled_llm.config import Mode
from support.huggingface.families import FAMILIES, make
from support.huggingface.recurrent_pairs import prompts_of

pytestmark = pytest.mark.gpu

LENGTHS = [5, 1, 16, 37, 150]


def tokens_of(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(own)) + own for own in prompts], device="cuda")
    mask = torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in prompts], device="cuda")
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return out[:, width:].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "Olmoe", "GptOss"])
def test_tokens_are_huggingfaces(family: str, mode: Mode, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: Any, **__: Any) -> Any:
        raise AssertionError("HuggingFace's experts ran")

    plain, prompts = make(family, FAMILIES[family], 0).cuda(), prompts_of(LENGTHS, seed)  # type: ignore[arg-type]
    expected = [tokens_of(plain, [own])[0] for own in prompts]
    model: Any = make(family, FAMILIES[family], 0).cuda()  # type: ignore[arg-type]
    compiled_llm.wrap(model, mode=mode, backend="triton", progress=False)
    for name in ("batched_mm", "grouped_mm"):
        monkeypatch.setitem(moe.ExpertsInterface._global_mapping, name, raises)
    for _ in range(2):
        assert tokens_of(model, prompts) == expected
    stats = model.compiled.stats()
    assert set(stats.experts) == {"compiled_llm"}
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)
