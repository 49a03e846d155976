"""What a rule of kernels has to choose among, and how long each candidate takes on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fitting.measuring import copies_of

MODELS = {"0.6B": (1024, 2048, 1024, 3072), "8B": (4096, 4096, 1024, 12288)}
"""Qwen3: hidden size, columns of all query heads, of all kv heads, intermediate size."""

VOCABULARY, PAGE_SIZE, HEAD_DIM, KV_HEADS = 151_936, 16, 128, 8


class Machine(NamedTuple):
    """What rules ask of a device; by default an H200's."""

    processors: int = 132
    shared_memory: int = 228 * 1024
    hopper: bool = True


class Case(NamedTuple):
    """One choice that a rule has to make."""

    rule: str  # its name, as for `--only`
    name: str  # what there is to sample for
    candidates: dict[str, Any]  # what could be sampled, by name
    chosen: str  # what the rule chooses, one of the names
    # allocates the inputs; returns what measures a candidate, in microseconds
    prepare: Callable[[], Callable[[Any], float]]


class Fit(NamedTuple):
    """A measured case; `times` are in microseconds, by candidate."""

    rule: str
    case: str
    best: str
    chosen: str
    slower: float
    times: dict[str, float]


def measure(case: Case) -> Fit:
    microseconds = case.prepare()
    times = {name: microseconds(candidate) for name, candidate in case.candidates.items()}
    best = min(times, key=times.__getitem__)
    return Fit(case.rule, case.name, best, case.chosen, times[case.chosen] / times[best] - 1, times)


def case_of(rule: str, name: str, candidates: Iterable[Any], chosen: Any, prepare: Any) -> Case:
    """A case whose candidates name themselves; the rule's choice is always among them."""
    return Case(rule, name, {str(one): one for one in [chosen, *candidates]}, str(chosen), prepare)


# ---- measuring


def pages_of(count: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """As many layers' pages `[P, 2, K, S, D]` as no cache holds."""
    return copies_of(torch.zeros(count, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM, device="cuda", dtype=dtype))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / math.sqrt(shape[-1])
