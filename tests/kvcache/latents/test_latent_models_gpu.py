"""Models of multi-head latent attention on a GPU: as exact as HuggingFace's, captured once, in every mode."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import transformers

from compiled_llm import Engine
from compiled_llm.config import Mode
from support.engine import tiny_engines
from support.execution.twins import (
    BEYOND_NOISE,
    DEVICE,
    SMALL,
    Twins,
    assert_parity,
    hf_logits,
    parity,
    random_model,
    rms,
    twins_of,
)
from support.latent_models import needs_latents
from support.parity import assert_account_is_empty

pytestmark = [pytest.mark.gpu, needs_latents]

SIZES: dict[str, dict[str, Any]] = {
    "512 + 64": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
    "256 + 32": {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64},
}


def random_latents(seed: int, sizes: str = "512 + 64", heads: int = 20) -> Any:
    own = {"num_attention_heads": heads, "num_key_value_heads": heads, "q_lora_rank": 96}
    config = transformers.YoutuConfig(**{**SMALL, **own, **SIZES[sizes], "head_dim": SIZES[sizes]["qk_rope_head_dim"]})
    return random_model(config, seed, (1, 2))


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


@pytest.mark.parametrize("backend", ["auto", "flashinfer"])
def test_an_engine_with_cached_beginnings_answers_as_exactly(backend: str, seed: int) -> None:
    """New rows expand their latents, the same prompts attend to cached ones later: near ties may differ, nothing else.

    Steps that are planned are planned for each token.
    """
    twins = twins_of(random_latents(seed), backend=backend)
    model = twins.wrapped
    prompts = torch.randint(3, 2048, (6, 90), generator=torch.Generator().manual_seed(seed)).tolist()
    prompts = [prompts[0][:60] + prompt[: number * 9 + 3] for number, prompt in enumerate(prompts)]
    with Engine(model) as engine:
        for cached in (False, True):
            outputs = engine.generate(prompts, tiny_engines.greedy(40))
            assert not cached or all(output.cached_tokens for output in outputs)
            judged = [best_of_float32(twins, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
            assert sum(judged) > 6 * 40 / 5
        assert engine.describe().kv_numbers_per_token == 2 * 576
    assert model.compiled.stats().recompiles == 0
    assert_account_is_empty(model)


def best_of_float32(twins: Twins, prompt: list[int], output: Any) -> int:
    """In how many steps noise explains no other choice; in these, the tokens are the best by float32."""
    tokens = torch.tensor(output.token_ids, device=DEVICE)
    ids = torch.cat([torch.tensor(prompt, device=DEVICE), tokens])[:-1]
    exact, plain = (hf_logits(own, ids, len(tokens)).float() for own in (twins.exact, twins.plain))
    noise = rms(plain - exact)
    noise = noise.clamp(min=noise.square().mean().sqrt())
    best = exact.topk(2)
    sure = best.values[:, 0] - best.values[:, 1] > BEYOND_NOISE * noise
    assert torch.equal(tokens[sure], best.indices[sure, 0])
    return int(sure.sum())


@pytest.mark.parametrize("mode", ["cuda-graphs", "compile", "piecewise"])
@pytest.mark.parametrize("heads", [20, 128], ids="heads={}".format)
def test_flashinfers_kernels_are_as_exact(mode: Mode, heads: int, seed: int) -> None:
    twins = twins_of(random_latents(seed, heads=heads), mode=mode, backend="flashinfer")
    assert_parity(parity(twins, [1, 15, 16, 17, 33, 64, 100, 250], 60, seed))
    assert twins.wrapped.compiled.stats().recompiles == 0
