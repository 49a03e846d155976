"""What parity tests share: prompts of mixed lengths, a comparison, the account that must add up after every call."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm

# For models with 128 tokens in their vocabulary and calls of a few rows.
FEW_PAGES: dict[str, Any] = {"page_size": 4, "kv_memory": "2000 tokens", "max_batch_size": 8, "progress": False}


def mixed_prompts(lengths: list[int], vocabulary: int, seed: int) -> dict[str, Tensor]:
    """Left-padded prompts of these lengths and their mask; token ids avoid the special ones."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(3, vocabulary, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def greedy(model: PreTrainedModel, inputs: dict[str, Tensor], new_tokens: int, **options: Any) -> Any:
    return model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **options)


def next_turn(inputs: dict[str, Any], out: Any, words: Tensor) -> dict[str, Any]:
    """What goes on with a conversation: the text so far and more words, their mask, and the cache of the answer."""
    ids, mask = torch.cat([out.sequences, words], dim=1), inputs["attention_mask"]
    more = mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])
    return {"input_ids": ids, "attention_mask": torch.cat([mask, more], dim=1), "past_key_values": out.past_key_values}


def assert_account_is_empty(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        gc.collect()  # what a compiler of kernels leaves behind holds the frames of a call that has waited for it
    if (account := model.compiled.stats().pages) is None:  # nothing has run
        return
    assert account.used == 0
    assert account.used + account.free + account.cached == account.total
    pool = model.compiled.model_runner().pool
    assert pool.available == account.free + account.cached, "pages are promised to nobody"
    if pool.states is not None:
        spare = len(set(model.compiled.model_runner().state.spare_states))
        states = pool.states.account()
        assert states.used == spare
        assert states.used + states.free + states.cached == states.total
        assert pool.states.available == states.free + states.cached, "states are promised to nobody"


def wrap_and_compare(model: PreTrainedModel, seed: int, **options: Any) -> None:
    """Wrap a model on a few pages; it generates what it did before, twice, from one graph for each program."""
    inputs = mixed_prompts([5, 19, 11], 128, seed)
    expected = greedy(model, inputs, 12)
    compiled_llm.wrap(model, **FEW_PAGES, **options)
    for _ in range(2):
        torch.testing.assert_close(greedy(model, inputs, 12), expected)
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)
    assert_account_is_empty(model)


def alone(model: PreTrainedModel, prompt: list[int], new: int, **options: Any) -> list[int]:
    """The tokens that `generate` gives to one prompt, the most likely ones."""
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options)
    return getattr(out, "sequences", out)[0, len(prompt) :].tolist()
