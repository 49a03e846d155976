"""Prompts that repeat themselves, so that drafts of their text are found."""

from __future__ import annotations

import torch
from torch import Tensor

from support.parity import mixed_prompts


def repeating(lengths: list[int], seed: int) -> dict[str, Tensor]:
    """Prompts that repeat themselves, some padded on the left."""
    inputs = mixed_prompts(lengths, 128, seed)
    for row in inputs["input_ids"]:
        row[-4:-2] = row[-2:]
    return {name: torch.cat([own, own], dim=1) for name, own in inputs.items()}
