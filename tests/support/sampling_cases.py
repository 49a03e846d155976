"""What draws have to follow, by HuggingFace's processors, and settings that reach every branch of the kernels.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compiled_llm.compilation.sampling import Sampling, SamplingTables

BRANCHES = [
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(temperature=0.8),
    Sampling(temperature=0.8, top_k=50),
    Sampling(temperature=0.8, top_k=50, top_p=0.95),
    Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2, seen=np.arange(0, 4000, 3)),
    Sampling(top_k=1),
    Sampling(top_k=128),
    Sampling(top_k=700),
    Sampling(top_k=700, top_p=0.6),
    Sampling(top_k=10**6),
    Sampling(top_p=0.95),
    Sampling(temperature=0.3, top_p=0.95),
    Sampling(top_p=1e-6),
    Sampling(top_p=0.999, min_p=1e-3),
    Sampling(min_p=0.05),
    Sampling(temperature=0.4, min_p=0.05),
    Sampling(min_p=1e-4),
    Sampling(min_p=1.0),
    Sampling(temperature=0.0, repetition_penalty=1.5, seen=np.arange(0, 4000, 2)),
]
"""Greedy, unfiltered, few candidates, too many for that, and thresholds that need no search."""


def warped(logits: Tensor, setting: Sampling, top_p: bool = True) -> Tensor:
    """`[V]` scores as HuggingFace's processors make them, with or without those after top-k."""
    processors = LogitsProcessorList()
    if setting.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(setting.repetition_penalty))
    if setting.temperature:
        processors.append(TemperatureLogitsWarper(setting.temperature))
    if setting.top_k:
        processors.append(TopKLogitsWarper(setting.top_k))
    if setting.top_p < 1.0 and top_p:
        processors.append(TopPLogitsWarper(setting.top_p))
    if setting.min_p > 0.0 and top_p:
        processors.append(MinPLogitsWarper(setting.min_p))
    seen = torch.from_numpy(setting.seen[setting.seen < len(logits)])
    return processors(seen[None], logits.float()[None].clone())[0]


def distribution(logits: Tensor, setting: Sampling) -> Tensor:
    """`[V]` float64 probabilities; where HuggingFace's top-p cuts through equal scores, all of them stay."""
    scores = warped(logits, setting, top_p=False).double()
    if setting.temperature == 0.0:
        return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
    if setting.top_p < 1.0:
        descending = scores.sort(descending=True).values
        before = descending.softmax(dim=0).cumsum(dim=0) - descending.softmax(dim=0)
        smallest = descending[: max(1, int((before < setting.top_p).sum()))].min()
        scores[scores < smallest] = -math.inf
    if setting.min_p > 0.0:
        scores[(scores - scores.max()).exp() < setting.min_p] = -math.inf
    return scores.softmax(dim=0)


SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def tables_of(settings: Sequence[Sampling], vocabulary: int, device: str = "cpu") -> SamplingTables:
    tables = SamplingTables.allocate(len(settings), vocabulary, torch.device(device))
    for slot, setting in enumerate(settings):
        for column, name in zip(tables[1:-1], SETTINGS, strict=True):
            column[slot] = min(getattr(setting, name), 2**62 if column.dtype == torch.int64 else 2**31 - 1)
        tables.seen[slot, setting.seen[setting.seen < vocabulary].tolist()] = True
    return tables


def arguments(logits: Tensor, uniform: Tensor, settings: Sequence[Sampling]) -> tuple[Any, ...]:
    """Those of `sample_tokens`, on the device of the logits, rows' entries in reverse order."""
    device = logits.device
    tables = tables_of(list(reversed(settings)), logits.shape[1], str(device))
    slots = torch.arange(len(settings), device=device).flip(0)
    return logits, uniform.to(device), slots, *tables[1:6], tables.seen


def assert_at(chosen: Tensor, uniform: Tensor, logits: Tensor, settings: Sequence[Sampling], slack: float) -> None:
    """Each row's token is the one at `uniform` of its distribution, but for sums in other orders."""
    for row, setting in enumerate(settings):
        probabilities, token = distribution(logits[row].cpu(), setting), int(chosen[row])
        above = float(probabilities[: token + 1].sum())
        where = f"row {row}, {setting}: token {token} at {float(uniform[row])}"
        assert probabilities[token] > 0, f"{where} was filtered"
        assert above - float(probabilities[token]) - slack <= float(uniform[row]) <= above + slack, f"{where}: {above}"


def middles(probabilities: Tensor, least: float = 1e-5) -> tuple[Tensor, Tensor]:
    """The tokens that are not rarer than `least`, and numbers in the middle of their parts of the distribution."""
    tokens = (probabilities > least).nonzero()[:, 0]
    return tokens, (probabilities.cumsum(dim=0) - probabilities / 2)[tokens]


def unusual_logits(vocabulary: int) -> Tensor:
    """`[7, V]`: rows with +inf, several of them, NaN, several of them, both, nothing but -inf, and equal logits."""
    logits = torch.randn(7, vocabulary)
    last, middle, first = vocabulary - 1, vocabulary // 2, vocabulary // 3
    logits[0, last] = logits[1, middle] = logits[1, last] = math.inf
    logits[2, middle] = logits[3, middle] = logits[3, last] = logits[4, last] = math.nan
    logits[4, first] = math.inf
    logits[5], logits[6] = -math.inf, 0.5
    return logits
