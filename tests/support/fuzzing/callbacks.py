"""Processors, criteria and streamers as a user writes them: they look, change, raise, interrupt, or call the model."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from support.fuzzing.data import Data
from support.fuzzing.side import Side

PROCESSORS = (
    "looks",
    "lowers",
    "replaces",
    "bans",
    "forces",
    "forces with inf",
    "raises",
    "interrupts",
    "signals",
    "generates",
)
CRITERIA = ("looks", "ends rows", "ends all", "raises", "interrupts", "signals", "generates", "patient", "shorter")
STREAMERS = ("looks", "raises", "interrupts", "signals", "generates", "raises at the end")


@dataclass(frozen=True, repr=False)
class Callback(Data):
    """What a callback does, and at which of its calls."""

    does: str = "looks"
    at: int = 0


class PlantedError(Exception):
    """Raised by a callback."""


class _Acting:
    """Counts its calls, and at one of them does what any callback can do."""

    def __init__(self, callback: Callback, side: Side) -> None:
        self.does, self.at, self.side, self.calls = callback.does, callback.at, side, 0

    def act(self) -> bool:
        """Return whether this is the call, or a later one."""
        now, self.calls = self.calls == self.at, self.calls + 1
        if now and self.does == "raises":
            raise PlantedError(f"at call {self.at}")
        if now and self.does == "interrupts":
            raise KeyboardInterrupt
        if now and self.does == "signals":
            signal.raise_signal(signal.SIGINT)
        if now and self.does == "generates":
            ids = torch.arange(3, 8)[None]
            self.side.note("generated", self.side.model.generate(ids, max_new_tokens=3, do_sample=False, num_beams=1))
        return self.calls > self.at


class Processor(_Acting, LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.side.note("processor", input_ids, scores)
        acts = self.act()
        if acts and self.does == "lowers":
            scores[:, ::2] -= 3
        if acts and self.does == "replaces":
            return scores * 0.5
        if acts and self.does == "bans":
            return scores.index_fill(1, torch.arange(1, scores.shape[1], 3), -math.inf)
        if acts and self.does == "forces":
            forced = torch.full_like(scores, -math.inf)
            forced[:, 3 + self.calls % 5] = 0
            return forced
        if acts and self.does == "forces with inf":
            return scores.index_fill(1, torch.tensor([4 + self.calls % 5]), math.inf)
        return scores


class Criterion(_Acting, StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.side.note("criterion", input_ids)
        acts = self.act()
        if acts and self.does == "ends rows":
            return input_ids[:, -1] % 4 == 0
        return torch.full((len(input_ids),), acts and self.does == "ends all")


class PatientEos(EosTokenCriteria):
    """A subclass with a rule of its own: the first token never ends a row."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return super().__call__(input_ids, scores, **kwargs) & (input_ids[:, 0] != input_ids[:, -1])


class ShorterLength(MaxLengthCriteria):
    """A subclass with a rule of its own: one token less."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.max_length - 1)


class Streamer(_Acting, BaseStreamer):
    def put(self, value: Tensor) -> None:
        self.side.note("streamer", value)
        self.act()

    def end(self) -> None:
        self.side.note("end")
        if self.does == "raises at the end":
            raise PlantedError("at the end")
