"""Tiny vision-language models on a GPU, in sizes that its kernels have, and HuggingFace's logits of their answers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from support.huggingface.vision import BOTH_WAYS, make

ROUTED = ["Qwen3VLMoe", "Qwen3_5Moe", "Kimi_K25"]
"""Models with experts are judged by most steps: bfloat16 turns near ties of their routers, and another expert is a
burst of noise, at other steps in each model. Of 120 steps on a CPU, one to eleven of HuggingFace's have another expert
than float32; by all steps our error was 0.6 to 1.9 of HuggingFace's, and 0.94 to 1.03 in most.
"""
AXES = {"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}}
OF_HIDDEN_SIZE = ["Qwen2VL", "Qwen2_5_VL", "Glm4v", "Glm46V", "GlmOcr"]
"""Their heads share the hidden size, whatever head_dim says."""
HEADS: dict[str, dict[str, Any]] = {
    "": {"head_dim": 64},
    **{family: {} for family in OF_HIDDEN_SIZE},
    **dict.fromkeys(("Qwen3VL", "Qwen3VLMoe"), AXES),
    **{family: {"head_dim": 64, "global_head_dim": 64} for family in ("Gemma4", "Gemma4Unified")},
    "Kimi_K25": {"head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16},
}
"""Sizes that kernels for GPUs have; the axes of positions share the rotated half of a head."""


def in_dtype(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs whose pixels are of a dtype."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def of_family(family: str, seed: int) -> PreTrainedModel:
    return make(family, seed, eos_token_id=None, **copy.deepcopy(HEADS.get(family, HEADS[""])))


def of_an_answer(model: PreTrainedModel, given: dict[str, Tensor], sequences: Tensor) -> Tensor:
    """`[N, B, V]`: HuggingFace's logits of the N tokens of an answer, by one forward over images and the whole text."""
    new = sequences.shape[1] - given["input_ids"].shape[1]
    answer = int(type(model).__name__.removesuffix("ForConditionalGeneration") in BOTH_WAYS)
    types = {name: pad(given[name], (0, new), value=answer) for name in given if name.endswith("token_type_ids")}
    images = {name: given[name] for name in given if name not in ("input_ids", "attention_mask", *types)}
    pixels = in_dtype(images, model.dtype)
    mask = pad(given["attention_mask"], (0, new), value=1)
    with torch.no_grad():
        logits = model(input_ids=sequences, attention_mask=mask, use_cache=False, **types, **pixels).logits
    return logits[:, -new - 1 : -1].transpose(0, 1).float()


def judged(family: str, errors: Tensor) -> float:
    """The error of a family's answers, of those of each step."""
    return float(errors.median() if family in ROUTED else errors.square().mean().sqrt())
