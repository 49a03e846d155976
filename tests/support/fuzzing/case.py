"""A case: a tiny model, what it is wrapped with, and what is done to it; and how it is made."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

import compiled_llm
from support.fuzzing.data import Data, Step
from support.fuzzing.side import OPTIONS, Side
from support.huggingface.families import make

CAPPED = frozenset(["Gemma2"])
"""Whose soft caps only HuggingFace's eager attention has; before transformers 5.21 others left them out."""


@dataclass(frozen=True, repr=False)
class Case(Data):
    """Plain data: printed, it is the code that makes it."""

    family: str = "Qwen3"  # one of ``support.huggingface.families``, or Qwen3 or Llama
    # what its config differs in from ``support.huggingface.families.TINY``
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # those of ``wrap`` beside ``OPTIONS``
    steps: tuple[Step, ...] = ()  # what is done, to the wrapped model and to its twin
    seed: int = 0  # of the weights

    def model(self) -> PreTrainedModel:
        """The unwrapped model: norms are uneven, so that none of them could be left out."""
        eager = {"attn_implementation": "eager"} if self.family in CAPPED else {}
        model = make(self.family, {**self.config, **eager}, self.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 and name.endswith("weight"):
                    torch.nn.init.uniform_(parameter, 0.7, 1.3)
        return model

    def sides(self) -> tuple[Side, Side]:
        """The wrapped model and its twin."""
        model, options = self.model(), {**OPTIONS, **self.options}
        twin = copy.deepcopy(model)
        return Side(compiled_llm.wrap(model, **options), options), Side(twin)


def nudged(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The same model with each weight moved by about one part in a million, as other orders of sums would move it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 1e-6 * torch.randn(parameter.shape, generator=generator))
    return model
