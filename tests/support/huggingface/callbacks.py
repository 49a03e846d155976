"""Processors, criteria and streamers of users' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer


class Halve(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, ::2] -= 3
        return scores


class Until(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] > 60


class Silent(BaseStreamer):
    def put(self, value: Tensor) -> None:
        pass

    def end(self) -> None:
        pass


class Collected(BaseStreamer):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


class Raising(Silent):
    """Raises an error at the call after so many."""

    def __init__(self, after: int, error: type[BaseException]) -> None:
        self.left, self.error = after, error

    def put(self, value: Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error("enough")


class LaterLength(MaxLengthCriteria):
    """Ends rows three tokens later than the length says."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids.new_full(input_ids.shape[:1], input_ids.shape[1] >= self.max_length + 3, dtype=torch.bool)


class SecondEos(EosTokenCriteria):
    """Ends rows that have two of the tokens after nine columns."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.isin(input_ids[:, 9:], self.eos_token_id.to(input_ids.device)).sum(1) >= 2
