"""Models with recurrent layers on a GPU: as exact as HuggingFace's in every mode, captured once."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import transformers

from compiled_llm import Engine
from compiled_llm.config import Mode
from support.engine import tiny_engines
from support.execution.twins import (
    RowNoise,
    assert_parity_in_most_steps,
    assert_parity_together,
    parity,
    random_model,
    twins_of,
)
from support.huggingface.recurrent_families import ALL_RECURRENT, CONFIGS, RECURRENT, SMALL
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.gpu

FAMILIES = sorted({*RECURRENT} - ALL_RECURRENT)
LARGER: dict[str, Any] = {"vocab_size": 2048, "max_position_embeddings": 2048}
LATENT_SIZES = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
"""Of latent attention, for which there are kernels."""


def model_of(family: str, seed: int) -> Any:
    """In bfloat16; most heads are as small as in float32, and tokens are many."""
    sizes = {**SMALL, **RECURRENT[family], **LARGER, **(LATENT_SIZES if "kv_lora_rank" in RECURRENT[family] else {})}
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**sizes)
    return random_model(config, seed)


def assert_as_exact(family: str, rows: list[RowNoise]) -> None:
    """States carry noise on, so rows are judged together: one of OLMo hybrid differs by up to 1.2 for a rounding more.

    Models with experts are judged by most steps.
    """
    routed = any("experts" in name and number > 1 for name, number in RECURRENT[family].items())
    (assert_parity_in_most_steps if routed else assert_parity_together)(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_exact_as_huggingfaces(family: str, seed: int) -> None:
    twins = twins_of(model_of(family, seed))
    assert_as_exact(family, parity(twins, [1, 15, 16, 17, 33, 64, 100, 250], 60, seed))
    assert twins.wrapped.compiled.stats().recompiles == 0


@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize("family", ["Qwen3_5", "GraniteMoeHybrid"])
def test_every_mode_is_as_exact(family: str, mode: Mode, seed: int) -> None:
    """In most steps: of three rows, a single one whose states carry a burst of noise on would decide the sum."""
    assert_parity_in_most_steps(parity(twins_of(model_of(family, seed), mode=mode), [5, 100, 33], 40, seed))


@pytest.mark.parametrize("family", ["Qwen3_5", "Lfm2", "KimiLinear"])
def test_long_prompts_in_chunks(family: str, seed: int) -> None:
    twins = twins_of(model_of(family, seed), prefill_tokens=64)
    assert_as_exact(family, parity(twins, [300, 10, 128, 64, 47], 40, seed))


@pytest.mark.parametrize("mixed", [False, True])
def test_an_engine_gives_all_states_back(mixed: bool, seed: int) -> None:
    twins = twins_of(model_of("Qwen3_5", seed))
    prompts = torch.randint(3, 2048, (12, 90), generator=torch.Generator().manual_seed(seed)).tolist()
    with Engine(twins.wrapped, mixed=mixed) as engine:
        first, again = (engine.generate(prompts, tiny_engines.greedy(40)) for _ in range(2))
    assert len(first) == len(again) == 12
    assert twins.wrapped.compiled.stats().recompiles == 0
    assert_account_is_empty(twins.wrapped)
    states = twins.wrapped.compiled.generate_loop().model_runner.pool.states
    assert states is not None
    assert states.account().used == 2, "the spare ones"
