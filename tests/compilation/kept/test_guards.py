"""Every guard that Dynamo has made of a trace is covered by an entry of its fingerprint, or it is not kept."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import pytest
import torch
from torch._C._dynamo.guards import GlobalStateGuard
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MixtralConfig, MixtralForCausalLM

import compiled_llm
from compiled_llm.compat.torch.kept import process_state
from compiled_llm.compat.torch.kept.guards import Guarded
from compiled_llm.compilation.kept.fingerprint import coverage, fingerprint
from compiled_llm.compilation.kept.fingerprint.walk import Walk
from support.compilation.fingerprinted import traced_programs
from support.huggingface.recurrent_families import recurrent_model
from support.parity import FEW_PAGES
from support.tiny_models import ONE_LAYER, TINY, randomised, tiny_llama, tiny_qwen3

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "query_pre_attn_scalar": 16}


def with_lora() -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "down_proj"], r=2)
    return get_peft_model(tiny_llama(**ONE_LAYER), config).base_model.model


FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama, outlined": lambda: tiny_llama(eos_token_id=None),
    "LoRA": with_lora,
    "Gemma 3": lambda: randomised(Gemma3ForCausalLM, Gemma3TextConfig(**{**TINY, **WINDOWS}), 0),
    "Qwen3": lambda: tiny_qwen3(**ONE_LAYER),
    "Mixtral": lambda: randomised(
        MixtralForCausalLM, MixtralConfig(**{**TINY, **ONE_LAYER, "num_local_experts": 4}), 0
    ),
    "Qwen3.5": lambda: recurrent_model("Qwen3_5"),
}
ALWAYS = ["Llama, outlined", "LoRA"]


def fingerprints(family: str, tokens: int) -> list[fingerprint.Fingerprint]:
    model = compiled_llm.wrap(FAMILIES[family](), **FEW_PAGES)
    return [traced.fingerprint for traced in traced_programs(model, tokens)]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_guards_of_prefill_and_decode_are_covered(family, whole):
    if family not in ALWAYS and not whole:
        pytest.skip("with --whole")
    guards: list[Guarded] = []

    def noting(found: Collection[Guarded], walk: Walk, per_call: Collection[str]) -> list[str]:
        guards.extend(found)
        return coverage.uncovered(found, walk, per_call)

    with mock.patch.object(fingerprint, "uncovered", noting):
        found = fingerprints(family, 3)
    assert [each.refused for each in found] == [None, None]
    assert len(guards) > 500
    unlooked = [guard for guard in guards if guard.missing and not guard.about.startswith("L['model']")]
    assert 20 * len(unlooked) < len(guards), unlooked  # else Dynamo's expressions are no longer evaluated


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("left_out", ["has_opened", "has_seen", "has_read"])
def test_a_guard_that_no_entry_covers_is_named(left_out):
    """Were values not looked into, not found, or globals no entries, nothing would be kept."""
    with mock.patch.object(Walk, left_out, return_value=False):
        (found,) = fingerprints("Qwen3", 1)
    assert found.refused is not None
    assert found.refused.startswith("it depends on ")


def test_a_trace_that_cannot_be_read_is_not_kept():
    """Another torch may lack what is asked for: the program runs all the same."""
    with mock.patch.object(fingerprint, "guards_now", side_effect=AttributeError("gone")):
        (found,) = fingerprints("Qwen3", 1)
    assert found.refused == "its trace cannot be read: AttributeError: gone"
    assert found.compared(found) == [found.refused]


def test_all_that_dynamo_compares_of_the_process_has_an_entry():
    guarded = GlobalStateGuard().__getstate__()  # type: ignore[attr-defined]
    assert all(f'"{name}":' in guarded for name in process_state._IN_WORDS), guarded
    assert not [name for name in process_state.state() if name.startswith("Dynamo's")], "give these a name of users'"


def test_settings_are_those_of_inductors_own_key():
    names = {name: values for name, values, _ in process_state.settings()}
    assert "max_autotune" in names["torch._inductor.config"]
    assert "cpp.simdlen" in names["torch._inductor.config"]
    assert not any(name.startswith("trace.") for name in names["torch._inductor.config"])
    with torch._inductor.config.patch(max_autotune=True):
        others = {name: found for name, _, found in process_state.settings()}
    assert others["torch._inductor.config"] == {"max_autotune"}
