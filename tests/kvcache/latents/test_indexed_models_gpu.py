"""Models whose indexers choose what queries read, on a GPU: as exact as HuggingFace's, captured once, in every mode."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from compiled_llm.config import Mode
from support.execution.twins import DEVICE, SMALL, assert_parity, parity, twins_of
from support.indexed_models import needs_indexers

pytestmark = [pytest.mark.gpu, needs_indexers]

SIZES: dict[str, Any] = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 96, "kv_lora_rank": 512, "head_dim": 64,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "index_topk": 32, "index_n_heads": 16,
    "index_head_dim": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 64, "mlp_layer_types": None, "first_k_dense_replace": 99, "pad_token_id": None,
}  # fmt: skip


def random_indexed(family: str, seed: int, **options: Any) -> PreTrainedModel:
    """Without experts, whose choices near ties would be another source of noise."""
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **SIZES, **options})
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        kind = getattr(transformers, f"{family}ForCausalLM")
        model: PreTrainedModel = kind._from_config(config, dtype=torch.bfloat16).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                torch.nn.init.uniform_(parameter, 1, 2)
    return model


@pytest.mark.parametrize("family", ["DeepseekV32", "GlmMoeDsa"])
@pytest.mark.parametrize("top", [32, 1024], ids="top={}".format)
def test_logits_are_as_exact_as_huggingfaces(family: str, top: int, seed: int) -> None:
    """With all tokens chosen, and with fewer, where near ties of bfloat16 choose others in both."""
    twins = twins_of(random_indexed(family, seed, index_topk=top))
    assert_parity(parity(twins, [1, 15, 16, 17, 33, 64, 100], 60, seed))
    assert twins.wrapped.compiled.stats().recompiles == 0


@pytest.mark.parametrize("mode", get_args(Mode))
def test_every_mode_is_as_exact(mode: Mode, seed: int) -> None:
    twins = twins_of(random_indexed("DeepseekV32", seed, index_topk=1024), mode=mode)
    assert_parity(parity(twins, [5, 100, 33], 40, seed))
