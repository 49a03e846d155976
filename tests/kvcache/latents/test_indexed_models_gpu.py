"""Models whose indexers choose what queries read, on a GPU: as exact as HuggingFace's, captured once, in every mode."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import transformers

import compiled_llm
from compiled_llm.config import Mode
from support.execution.twins import (
    SMALL,
    assert_parity,
    assert_parity_together,
    parity,
    prompts_on_device,
    random_model,
    twins_of,
)
from support.indexed_models import BLOCKS, needs_blocks, needs_indexers
from support.parity import greedy

pytestmark = [pytest.mark.gpu, needs_indexers]

SIZES: dict[str, Any] = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 96, "kv_lora_rank": 512, "head_dim": 64,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "index_topk": 32, "index_n_heads": 16,
    "index_head_dim": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 64, "mlp_layer_types": None, "first_k_dense_replace": 99, "pad_token_id": None,
}  # fmt: skip


def random_indexed(family: str, seed: int, **options: Any) -> Any:
    """Without experts, whose choices near ties would be another source of noise."""
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **SIZES, **options})
    return random_model(config, seed, (1, 2))


@pytest.mark.parametrize("family", ["DeepseekV32", "GlmMoeDsa"])
@pytest.mark.parametrize("top", [32, 1024], ids="top={}".format)
def test_logits_are_as_exact_as_huggingfaces(family: str, top: int, seed: int) -> None:
    """With all tokens chosen, and with fewer, where near ties of bfloat16 choose others in both."""
    twins = twins_of(random_indexed(family, seed, index_topk=top))
    judge = assert_parity if top > 200 else assert_parity_together
    judge(parity(twins, [1, 15, 16, 17, 33, 64, 100], 60, seed))
    assert twins.wrapped.compiled.stats().recompiles == 0


@pytest.mark.parametrize("mode", get_args(Mode))
def test_every_mode_is_as_exact(mode: Mode, seed: int) -> None:
    twins = twins_of(random_indexed("DeepseekV32", seed, index_topk=1024), mode=mode)
    assert_parity(parity(twins, [5, 100, 33], 40, seed))


@pytest.mark.parametrize("mode", ["compile", "cuda-graphs"])
def test_scores_of_long_prompts_take_no_more_than_the_account_says(mode: Mode, seed: int) -> None:
    """Scores of all at once would take 16 heads * 4 bytes * (6 * 4000)^2, 37 GB."""
    model: Any = compiled_llm.wrap(random_indexed("DeepseekV32", seed), mode=mode, max_batch_size=8, kv_memory=0.2)
    inputs = {**prompts_on_device([4000] * 6, seed), "pad_token_id": 0}
    greedy(model, inputs, 4)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    greedy(model, inputs, 4)
    torch.cuda.synchronize()
    stats = model.compiled.stats()
    activations = 8192 * 2**14  # of a prefill's tokens
    assert torch.cuda.max_memory_allocated() - before < stats.memory["scores"] + activations
    assert (stats.recompiles, stats.graph_breaks) == (0, 0)


# ---- chosen blocks


def random_blocks(seed: int, chosen: int) -> Any:
    """Without experts, too."""
    sizes = {"num_attention_heads": 16, "index_block_size": 32, "index_topk_blocks": chosen, "index_head_dim": 128}
    dense = {"num_hidden_layers": 3, "mlp_layer_types": ["dense"] * 3, "dense_intermediate_size": 512}
    config = transformers.MiniMaxM3VLTextConfig(**{**BLOCKS, **SMALL, **sizes, **dense, "rotary_dim": 64})
    return random_model(config, seed, (0, 1))


@needs_blocks
@pytest.mark.parametrize("chosen", [3, 16], ids="blocks={}".format)
def test_logits_with_chosen_blocks_are_as_exact_as_huggingfaces(chosen: int, seed: int) -> None:
    """With all blocks chosen, and with fewer, where near ties of bfloat16 choose others in both."""
    twins = twins_of(random_blocks(seed, chosen))
    judge = assert_parity if chosen * 32 > 260 else assert_parity_together
    judge(parity(twins, [1, 31, 32, 33, 64, 200], 60, seed))
    assert twins.wrapped.compiled.stats().recompiles == 0


@needs_blocks
@pytest.mark.parametrize("mode", get_args(Mode))
def test_every_mode_is_as_exact_with_chosen_blocks(mode: Mode, seed: int) -> None:
    assert_parity(parity(twins_of(random_blocks(seed, 16), mode=mode), [5, 100, 33], 40, seed))
