"""Layers that attend by variants on a GPU: tokens, judged by HuggingFace's attention of the model's own in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import Engine, SamplingParams
from support.execution.twins import BEYOND_NOISE, DEVICE, OPTIONS, rms
from support.parity import assert_account_is_empty
from support.variant_models import variants_for, with_attention

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "vocab_size": 512, "num_hidden_layers": 3}
WAYS: dict[str, dict[str, Any]] = {
    "cuda-graphs": {},
    "compile": {"mode": "compile"},
    "piecewise": {"mode": "piecewise"},
    "eager": {"mode": "eager"},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "fp8": {"kv_dtype": "fp8_e4m3"},
    "flashinfer": {"backend": "flashinfer"},
    "flashinfer, eager": {"backend": "flashinfer", "mode": "eager"},
    "reference": {"backend": "reference", "mode": "eager"},
}


def in_bfloat16(model: PreTrainedModel) -> PreTrainedModel:
    """Tensors of variants remain in float32."""
    kept = {name: buffer for name, buffer in model.named_buffers() if name.endswith((".slopes", ".shift"))}
    model.to(DEVICE, torch.bfloat16)
    for name, buffer in kept.items():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, buffer.to(DEVICE, torch.float32))
    return model


def check_greedy(exact: PreTrainedModel, own: PreTrainedModel, prompt: list[int], answer: list[int]) -> None:
    """Given what was fed in, each token is the most likely one but for bfloat16's noise."""
    ids = torch.tensor([prompt + answer], device=DEVICE)
    with torch.no_grad():
        logits, noisy = (model(ids).logits[0, len(prompt) - 1 : -1].float() for model in (exact, own))
    behind = logits.amax(dim=1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    noise = rms(noisy - logits)
    missed = behind > BEYOND_NOISE * noise.clamp(min=noise.mean())
    assert not missed.any(), f"tokens {missed.nonzero()[:, 0].tolist()} of an answer to {len(prompt)} tokens"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["alibi", "sigmoid", "inkling"])
def test_tokens_are_those_of_the_models_own_attention(kind: str, way: str, seed: int) -> None:
    if way == "fp8" and kind != "alibi":
        pytest.skip("its noise is judged in tests of fp8")
    model = in_bfloat16(with_attention(kind, seed, **SIZES))
    exact, own = copy.deepcopy(model).float(), copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, 512, (length,), generator=generator).tolist() for length in (1, 5, 16, 17, 100, 300)]
    options = {**OPTIONS, "kv_memory": "4000 tokens", "prefill_tokens": 64, **WAYS[way]}
    compiled_llm.wrap(model, **options, **variants_for(kind))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with Engine(model, max_num_seqs=8) as engine:
        for _ in range(2):
            outputs = [output.token_ids for output in engine.generate(prompts, params)]
            for prompt, answer in zip(prompts, outputs, strict=True):
                if way != "fp8":
                    check_greedy(exact, own, prompt, answer)
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)
    assert_account_is_empty(model)
