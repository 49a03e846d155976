"""Modules that act otherwise in training mode are found in the code of their classes, and named."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM, OPTConfig, OPTForCausalLM
from transformers.models.opt import modeling_opt as opt

from compiled_llm.model.version.training import difference, training_difference
from support.tiny_models import tiny_llama, tiny_qwen3

pytestmark = pytest.mark.core


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


class Jittered(nn.Module):
    def __init__(self, jitter: float) -> None:
        super().__init__()
        self.jitter = jitter

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.jitter > 0:
            x = x + torch.randn_like(x) * self.jitter
        return x


class ByALocal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        p = 0.0
        return nn.functional.dropout(x, p=p, training=self.training)


class ElseALocal(Jittered):
    def forward(self, x: Tensor, other: float = 0.0) -> Tensor:
        return x * (self.jitter if self.training else other)


class OfAnother(Jittered):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.Dropout(0.25), "x (Dropout: p=0.25)"),
        (nn.Dropout2d(0.25), "x (Dropout2d: p=0.25)"),
        (nn.Dropout(0.0), None),
        (nn.BatchNorm1d(3), "x (BatchNorm1d: its code reads `training`)"),
        (nn.LayerNorm(3), None),
        (nn.InstanceNorm1d(3), None),
        (nn.InstanceNorm1d(3, track_running_stats=True), "x (InstanceNorm1d: track_running_stats=True)"),
        (Scaled(), "x (Scaled: its code reads `training`)"),
        (Jittered(0.5), "x (Jittered: jitter=0.5)"),
        (Jittered(0.0), None),
        (ByALocal(), "x (ByALocal: its code reads `training`)"),
        (ElseALocal(0.0), "x (ElseALocal: its code reads `training`)"),
        (OfAnother(0.5), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_module_is_judged_by_its_code_and_its_attributes(module: nn.Module, said: str | None) -> None:
    found = difference("x", module)
    assert (None if found is None else str(found)) == said


def small_gpt2(**options: Any) -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, **options))


def small_opt(**options: Any) -> Any:
    options |= {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 16, "num_attention_heads": 2}
    return OPTForCausalLM(OPTConfig(vocab_size=32, num_hidden_layers=1, max_position_embeddings=32, **options))


def small_mamba() -> Any:
    return MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4))


ALWAYS_DRAWS = "self.layerdrop > 0" not in inspect.getsource(opt.OPTDecoder)
"""OPT of transformers 5.17 draws a number for each layer in training mode, whether it may drop one or not."""
DRAWS = "model.decoder (OPTDecoder: its code reads `training`)" if ALWAYS_DRAWS else None


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (tiny_qwen3(), None),
        (tiny_llama(attention_dropout=0.1), "model.layers.0.self_attn (LlamaAttention: attention_dropout=0.1)"),
        (small_gpt2(embd_pdrop=0, attn_pdrop=0, resid_pdrop=0), None),
        (small_gpt2(embd_pdrop=0, attn_pdrop=0), "transformer.h.0.attn.resid_dropout (Dropout: p=0.1)"),
        (small_opt(dropout=0.0), DRAWS),
        (small_opt(dropout=0.0, layerdrop=0.3), DRAWS or "model.decoder (OPTDecoder: layerdrop=0.3)"),
        (small_mamba(), None),
    ],
    ids=["qwen3", "attention dropout", "gpt2", "a dropout", "opt", "layers dropped", "mamba"],
)
def test_huggingfaces_models_pass_without_dropout(model: Any, said: str | None) -> None:
    assert training_difference(model.eval().named_modules()) is None
    found = training_difference(model.train().named_modules())
    assert (None if found is None else str(found)) == said


def test_checkpointed_gradients_are_told_from_all_else() -> None:
    model = tiny_qwen3().train()
    model.gradient_checkpointing_enable()
    found = training_difference(model.named_modules())
    assert found is not None
    assert found.checkpoints
    model.model.layers[1].self_attn.attention_dropout = 0.1
    found = training_difference(model.named_modules())
    assert found is not None
    assert (found.checkpoints, found.module) == (False, "model.layers.1.self_attn")


def test_one_module_in_training_mode_counts() -> None:
    model = tiny_qwen3(attention_dropout=0.1)
    model.model.layers[1].train()
    found = training_difference(model.named_modules())
    assert found is not None
    assert found.module == "model.layers.1.self_attn"
