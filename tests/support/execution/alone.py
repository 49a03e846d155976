"""A row as HuggingFace computes it: by itself, with a cache of its own."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel


class Alone:
    """One row on HuggingFace's own forward with a cache of its own."""

    def __init__(self, plain: PreTrainedModel, prompt: list[int]) -> None:
        self._plain = plain
        self._cache = DynamicCache(config=plain.config)
        self.fed: list[int] = []
        self.logits = torch.empty(0)
        self.feed(prompt)

    def feed(self, tokens: list[int]) -> None:
        with torch.no_grad():
            out = self._plain(input_ids=torch.tensor([tokens]), past_key_values=self._cache)
        self.logits = out.logits[0, -1]
        self.fed += tokens

    @property
    def next(self) -> int:
        return int(self.logits.argmax())
