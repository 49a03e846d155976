"""Layers that attend over keys and values of earlier ones: pages hold these of each, HuggingFace's caches of none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

import compiled_llm
from compiled_llm import UnsupportedModelError
from compiled_llm.model.probes.mask_probe import _Shared
from support.huggingface.cache_name import CACHE
from support.huggingface.families import FAMILIES, make
from support.parity import FEW_PAGES, assert_account_is_empty, greedy, mixed_prompts, next_turn

pytestmark = pytest.mark.core

CACHES: dict[str, Callable[[PreTrainedModel], Cache]] = {
    "configured": lambda model: DynamicCache(config=model.config),
    "lazy": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=64),
}


def pair(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    plain, wrapped = (make(family, FAMILIES[family], 0) for _ in range(2))
    return plain, compiled_llm.wrap(wrapped, mode="eager", **FEW_PAGES)


@pytest.fixture
def inputs(seed: int) -> dict[str, Tensor]:
    return mixed_prompts([5, 12, 9], 128, seed)


@pytest.mark.drawn(most=1)
@torch.no_grad()
@pytest.mark.parametrize("family", ["Gemma3n", "Gemma4"])
def test_a_conversation_beams_and_drafts_run_over_pages(family: str, inputs: dict[str, Tensor]) -> None:
    words, models = torch.full((3, 2), 7), pair(family)

    def answers(model: PreTrainedModel) -> list[Tensor]:
        first = greedy(model, inputs, 6, return_dict_in_generate=True)
        second = greedy(model, next_turn(inputs, first, words), 6)
        alone = {"input_ids": inputs["input_ids"][1:2]}
        return [second, greedy(model, inputs, 6, num_beams=2), greedy(model, alone, 6, prompt_lookup_num_tokens=2)]

    theirs, ours = map(answers, models)
    torch.testing.assert_close(ours, theirs)
    assert models[1].compiled.stats().generate_calls == {"fast loop": 3, "compiled forward": 1}
    assert_account_is_empty(models[1])


@pytest.mark.drawn(most=1)
@torch.no_grad()
@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_of_huggingfaces_is_read_and_filled_without_what_layers_share(
    kind: str, inputs: dict[str, Tensor]
) -> None:
    models = pair("Gemma4")

    def answers(model: PreTrainedModel) -> list[Tensor]:
        cache, ids = CACHES[kind](model), inputs["input_ids"]
        given: dict[str, Any] = {CACHE: cache}
        first = greedy(model, inputs, 6, return_dict_in_generate=True, **given)
        logits = [model(ids[:, :1], **given).logits for _ in range(2)]
        asked = {"cache_implementation": "static", "return_dict_in_generate": True}
        return [first.sequences, *logits, greedy(model, inputs, 6, **asked).sequences]

    theirs, ours = map(answers, models)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    stats = models[1].compiled.stats()
    assert stats.slow_paths["forward: past_key_values"] == 2
    assert stats.generate_calls == {"fast loop": 2}
    assert_account_is_empty(models[1])


def test_a_layer_whose_cache_is_empty_and_that_shares_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Gemma4", FAMILIES["Gemma4"], 0)
    if len(DynamicCache(config=model.config).layers) < model.config.num_hidden_layers:
        pytest.skip("before transformers 5.23 caches have no such layers")
    assert _Shared.of(model) == {2: 0, 3: 1}
    monkeypatch.setattr(_Shared, "of", lambda model: {})
    with pytest.raises(UnsupportedModelError, match="attention layer 2 keeps a DummyLayer"):
        compiled_llm.wrap(model, mode="eager")
