"""Models of multi-head latent attention on a GPU: as exact as HuggingFace's, captured once, in every mode."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import Engine
from compiled_llm.config import Mode
from support.engine import tiny_engines
from support.execution.twins import DEVICE, OPTIONS, SMALL, assert_parity, parity, twins_of
from support.latent_models import needs_latents
from support.parity import assert_account_is_empty

pytestmark = [pytest.mark.gpu, needs_latents]

SIZES: dict[str, dict[str, Any]] = {
    "512 + 64": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "256 + 32": {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64},
}


def random_latents(seed: int, sizes: str = "512 + 64", heads: int = 20) -> PreTrainedModel:
    own = {"num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": 96}
    config = transformers.YoutuConfig(**{**SMALL, **own, **SIZES[sizes], "head_dim": SIZES[sizes]["qk_rope_head_dim"]})
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model: PreTrainedModel = transformers.YoutuForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 1, 2)
    return model


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("heads", [16, 20, 128], ids="heads={}".format)
def test_logits_are_as_exact_as_huggingfaces(sizes: str, heads: int, seed: int) -> None:
    twins = twins_of(random_latents(seed, sizes, heads))
    assert_parity(parity(twins, [1, 15, 16, 17, 33, 64, 100, 250], 120, seed))
    assert twins.wrapped.compiled.stats().recompiles == 0


@pytest.mark.parametrize("mode", get_args(Mode))
def test_every_mode_is_as_exact(mode: Mode, seed: int) -> None:
    assert_parity(parity(twins_of(random_latents(seed), mode=mode), [5, 100, 33], 40, seed))


def test_long_prompts_in_chunks(seed: int) -> None:
    assert_parity(parity(twins_of(random_latents(seed), prefill_tokens=64), [300, 10, 128, 64, 47], 40, seed))


def test_an_engine_with_cached_beginnings_answers_as_alone(seed: int) -> None:
    model = compiled_llm.wrap(random_latents(seed), **OPTIONS)
    prompts = torch.randint(3, 2048, (6, 90), generator=torch.Generator().manual_seed(seed)).tolist()
    prompts = [prompts[0][:60] + prompt[: number * 9 + 3] for number, prompt in enumerate(prompts)]
    with Engine(model) as engine:
        first = engine.generate(prompts, tiny_engines.greedy(20))
        again = engine.generate(prompts, tiny_engines.greedy(20))
        assert all(output.cached_tokens for output in again)
        assert engine.describe().kv_numbers_per_token == 2 * 576
    assert [output.token_ids[0] for output in first] == [output.token_ids[0] for output in again]
    assert model.compiled.stats().recompiles == 0
    assert_account_is_empty(model)
