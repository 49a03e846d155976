"""Under autocast that changes nothing in a model, calls are compiled; else HuggingFace's own code runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import compiled_llm
from support.huggingface.families import FAMILIES, make
from support.huggingface.pairs import OPTIONS
from support.tiny_models import tiny_qwen3

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
CHANGED = frozenset({"AXK1", "DeepseekV2", "DeepseekV3", "DeepseekV32", "Glm4MoeLite", "GlmMoeDsa"})
"""Those whose experts are chosen in float32."""


def casting(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.autocast(device, dtype)


def in_bfloat16(family: str) -> PreTrainedModel:
    model = tiny_qwen3(eos_token_id=None) if family == "Qwen3" else make(family, FAMILIES[family], 0).eval()
    return model.bfloat16()


def paths(model: PreTrainedModel) -> tuple[dict[str, int], dict[str, int]]:
    stats = model.compiled.stats()
    return stats.forward_calls, stats.generate_calls


@torch.no_grad()
@pytest.mark.parametrize(
    "family",
    [
        "Qwen3",
        "DeepseekV3",
        *(pytest.param(name, marks=pytest.mark.whole) for name in FAMILIES if name != "DeepseekV3"),
    ],
)
def test_calls_that_autocast_does_not_change_are_compiled(family: str) -> None:
    plain = in_bfloat16(family)
    wrapped = compiled_llm.wrap(copy.deepcopy(plain), **OPTIONS)
    with casting():
        ours, theirs = (model(IDS).logits for model in (wrapped, plain))
        answers = [
            model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, do_sample=False, pad_token_id=0)
            for model in (wrapped, plain)
        ]
    exact = copy.deepcopy(plain).float()(IDS).logits
    error, huggingfaces = ((logits.float() - exact).square().mean().sqrt() for logits in (ours, theirs))
    assert ours.dtype == theirs.dtype
    assert error <= 1.1 * huggingfaces
    if family == "Qwen3":
        assert torch.equal(ours, theirs)
        assert torch.equal(*answers)
    path = ("original", "original") if family in CHANGED else ("compiled", "fast loop")
    assert paths(wrapped) == ({path[0]: 1}, {path[1]: 1})


@torch.no_grad()
def test_a_module_in_another_type_is_noticed_when_it_comes_and_when_it_goes() -> None:
    """As adapters in float32 do, in whose products autocast rounds."""
    wrapped = compiled_llm.wrap(in_bfloat16("Qwen3"), **OPTIONS)
    layer: Any = wrapped.model.layers[0].mlp
    before = layer.down_proj

    class InFloat32(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(before).float()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(hidden.float()).to(hidden.dtype)
            return out

    with casting():
        wrapped(IDS)
        layer.down_proj = InFloat32()
        wrapped(IDS)
        layer.down_proj = before
        wrapped(IDS)
    assert wrapped.compiled.stats().forward_calls == {"compiled": 2, "original": 1}
    assert wrapped.compiled.stats().slow_paths == {"forward: autocast": 1}


@torch.no_grad()
def test_another_type_than_that_of_the_weights_is_huggingfaces() -> None:
    wrapped = compiled_llm.wrap(tiny_qwen3(), **OPTIONS)
    with casting():
        wrapped(IDS)
    assert wrapped.compiled.stats().slow_paths == {"forward: autocast": 1}


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(("family", "path"), [("Qwen3", "compiled"), ("Starcoder2", "original")])
def test_on_cuda_layer_norms_are_changed(family: str, path: str) -> None:
    wrapped = compiled_llm.wrap(in_bfloat16(family).cuda(), **OPTIONS)
    with casting("cuda"):
        wrapped(IDS.cuda())
    assert wrapped.compiled.stats().forward_calls == {path: 1}
