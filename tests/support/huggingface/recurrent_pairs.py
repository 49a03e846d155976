"""Wrapped models with recurrent layers, and what HuggingFace gives their rows, each alone in a fresh cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from support.huggingface.recurrent_families import ALL_RECURRENT, RECURRENT, recurrent_model

FEW: dict[str, Any] = {"page_size": 4, "kv_memory": "1200 tokens", "max_batch_size": 8, "prefill_tokens": 16}
"""Pages and tokens of a chunk, so that prompts here are cut."""
HYBRIDS = [family for family in RECURRENT if family not in ALL_RECURRENT]
LENGTHS = [5, 1, 16, 37]
PAD = 0


def wrapped_family(family: str, mode: Any = "eager", **options: Any) -> Any:
    return compiled_llm.wrap(recurrent_model(family), mode=mode, progress=False, **{**FEW, **options})


@functools.cache
def plain_family(family: str) -> PreTrainedModel:
    """One that no test changes."""
    return recurrent_model(family)


def prompts_of(lengths: Sequence[int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in lengths]


def left_padded(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(own)) + list(own) for own in prompts])
    mask = torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def new_tokens_of(model: Any, prompts: Sequence[Sequence[int]], new: int, **options: Any) -> list[list[int]]:
    """What greedy decoding of a batch adds to each row."""
    inputs = left_padded(prompts)
    out = model.generate(**inputs, max_new_tokens=new, do_sample=False, pad_token_id=PAD, **options)
    return getattr(out, "sequences", out)[:, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def of_rows_alone(family: str, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """What HuggingFace adds to each row alone, however often it is asked for."""
    return [_alone(family, tuple(own), -(-new // 16) * 16)[:new] for own in prompts]


@functools.cache
def _alone(family: str, prompt: tuple[int, ...], new: int) -> list[int]:
    return new_tokens_of(plain_family(family), [prompt], new, eos_token_id=None)[0]


def poison_released_states(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fill entries of states with NaN once nobody owns them; return which ones, as they come."""
    state = model.compiled.generate_loop().model_runner.state
    released: list[int] = []
    disown, uncache = state.pool.states._disown, state.pool.states.uncache

    def poison(entry: int) -> None:
        released.append(entry)
        for memory in state.states:
            memory[entry] = torch.nan

    def poisoning(release: Callable[[Iterable[int]], object]) -> Callable[[Iterable[int]], object]:
        def released_now(entries: Iterable[int]) -> object:
            entries = list(entries)
            result = release(entries)
            for entry in entries:
                if not state.pool.states._owners[entry]:
                    poison(entry)
            return result

        return released_now

    monkeypatch.setattr(state.pool.states, "_disown", poisoning(disown))
    monkeypatch.setattr(state.pool.states, "uncache", poisoning(uncache))
    return released
