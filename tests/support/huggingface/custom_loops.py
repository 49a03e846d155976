"""Decoding methods as somebody would write them for ``custom_generate``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def own_greedy(model: Any, input_ids: Tensor, generation_config: Any = None, **kwargs: Any) -> Tensor:
    """Take the most likely token, nine times."""
    kwargs = {name: kwargs[name] for name in ("attention_mask", "past_key_values") if kwargs.get(name) is not None}
    new = input_ids
    for _ in range(9):
        out = model(input_ids=new, use_cache=True, **kwargs)
        new = out.logits[:, -1:].argmax(-1)
        input_ids = torch.cat([input_ids, new], dim=1)
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = torch.cat([kwargs["attention_mask"], torch.ones_like(new)], dim=1)
        kwargs["past_key_values"] = out.past_key_values
    return input_ids
