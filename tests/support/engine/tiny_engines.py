"""A tiny wrapped model for engines, and settings with which they give HuggingFace's tokens."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.requests.sampling_params import SamplingParams
from support.parity import alone
from support.tiny_models import tiny_qwen3

PATIENCE = 60.0
"""Seconds after which a test gives up waiting."""


def greedy(tokens: int, **others: Any) -> SamplingParams:
    """The most likely tokens, this many."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **others)


def tiny(seed: int = 0, **config: Any) -> PreTrainedModel:
    """A plain model of one layer that goes on for ever."""
    return tiny_qwen3(seed, **{"eos_token_id": None, "num_hidden_layers": 1, **config})


def wrapped(tokens: int = 2000, plain: PreTrainedModel | None = None, **options: Any) -> PreTrainedModel:
    """A tiny model, or another one, wrapped with pages for this many tokens."""
    options = {"mode": "eager", "page_size": 4, "max_batch_size": 4, "progress": False, **options}
    return compiled_llm.wrap(tiny() if plain is None else plain, kv_memory=f"{tokens} tokens", **options)


def huggingfaces(prompt: Sequence[int], tokens: int, seed: int = 0, penalty: float = 1.0) -> list[int]:
    """The tokens of a plain ``tiny(seed)``, each answer computed once: a longer one begins like a shorter one."""
    return _huggingfaces(tuple(prompt), -(-tokens // 64) * 64, seed, penalty)[:tokens]


@functools.cache
def _huggingfaces(prompt: tuple[int, ...], tokens: int, seed: int, penalty: float) -> list[int]:
    return alone(tiny(seed), list(prompt), tokens, repetition_penalty=penalty)
