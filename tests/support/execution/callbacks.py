"""A streamer or stopping criterion that calls a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer


class Callback(BaseStreamer, StoppingCriteria):
    """Calls a function after each token, as a streamer or as a stopping criterion."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.results: list[Any] = []

    def put(self, value: Tensor) -> None:
        if value.dim() == 1:  # the prompt comes first
            self.results.append(self.function())

    def end(self) -> None:
        pass

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.results.append(self.function())
        return torch.zeros(len(input_ids), dtype=torch.bool)
