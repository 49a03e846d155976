"""A function of attention that the user has registered is refused or run, never replaced without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import compiled_llm
from compiled_llm.kinds.refusals import UnsupportedModelError
from compiled_llm_ops import register_variant
from support.huggingface import vision
from support.huggingface.feature_calls import forward, generate, inputs
from support.huggingface.pairs import OPTIONS
from support.tiny_models import tiny_qwen3

OWN = "half_of_sdpa"


def half(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """Attention with logits of half the size."""
    return sdpa_attention_forward(module, query / 2, key, value, mask, **kwargs)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (OWN, "owner/kernels"):
        monkeypatch.setitem(AttentionInterface._global_mapping, name, half)
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, sdpa_mask)


def tiny(attention: str) -> Any:
    model = tiny_qwen3(eos_token_id=None)
    model.config._attn_implementation = attention  # as from_pretrained has it once a kernel was loaded
    return model


def test_one_of_the_users_is_refused_by_name() -> None:
    model = tiny(OWN)
    with pytest.raises(UnsupportedModelError, match=f"attn_implementation='{OWN}' is .* of your own.*register_variant"):
        compiled_llm.wrap(model, **OPTIONS)
    assert not hasattr(model, "compiled")


def test_one_that_took_the_place_of_huggingfaces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", half)
    with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"):
        compiled_llm.wrap(tiny("sdpa"), **OPTIONS)


@pytest.mark.parametrize("name", ["sdpa", "eager", "owner/kernels"])
def test_huggingfaces_and_kernels_of_its_hub_stay(name: str) -> None:
    assert compiled_llm.wrap(tiny(name), **OPTIONS).compiled.facts.replaced_attention() is None


def test_with_variants_the_user_has_said_what_runs_in_its_place() -> None:
    register_variant("half_of_the_logit", lambda logit, row, head, query_position, key_position: logit / 2)
    model = tiny(OWN)
    expected = forward()(model).logits
    compiled_llm.wrap(model, **OPTIONS, variants={"half_of_the_logit": "all"})
    torch.testing.assert_close(forward()(model).logits[:, -1], expected[:, -1], rtol=1e-4, atol=1e-4)
    assert model.compiled.stats().forward_calls == {"compiled": 1}


def test_one_of_a_vision_tower_stays_huggingfaces() -> None:
    model: Any = vision.make("Gemma3")
    model.model.vision_tower.config._attn_implementation = OWN
    assert compiled_llm.wrap(model, **OPTIONS).compiled.facts.replaced_attention() is None


def test_one_that_is_set_after_wrap_runs_and_is_counted() -> None:
    plain, model = tiny("sdpa"), compiled_llm.wrap(tiny("sdpa"), **OPTIONS)
    usual = generate()(model)
    for either in (plain, model):
        either.set_attn_implementation(OWN)
    torch.testing.assert_close(generate()(model), generate()(plain))
    torch.testing.assert_close(forward()(model).logits, forward()(plain).logits)
    stats = model.compiled.stats()
    assert stats.slow_paths == {"attn_implementation": 1, "forward: attn_implementation": 1}
    with compiled_llm.Engine(model) as engine, pytest.raises(RuntimeError, match=OWN):
        engine.generate([inputs()["input_ids"][0].tolist()])
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(generate()(model), usual)
    assert model.compiled.stats().generate_calls["fast loop"] == 2
