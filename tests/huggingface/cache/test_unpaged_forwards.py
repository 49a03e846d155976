"""Forwards of new rows need no pages on a CPU: their bits are HuggingFace's, and their cache enters pages when used."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm import Engine
from compiled_llm.execution.prefill.unpaged import Unpaged
from compiled_llm.kvcache.errors import OutOfPagesError
from support.huggingface.pairs import Models, pair
from support.parity import assert_account_is_empty

SHAPES = [(1, 2), (1, 16), (1, 70), (2, 1), (3, 11), (4, 64)]


@pytest.fixture
def models() -> Models:
    return pair({"kv_memory": "400 tokens", "max_batch_size": 4}, eos_token_id=None)


@pytest.fixture
def unpaged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of forwards that have run without pages."""
    shapes: list[tuple[int, ...]] = []
    run = Unpaged.run

    def noted(self: Unpaged, ids: Any, positions: Any, keep: Any) -> Any:
        shapes.append(ids.shape)
        return run(self, ids, positions, keep)

    monkeypatch.setattr(Unpaged, "run", noted)
    return shapes


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 128, shape)


def used_pages(model: PreTrainedModel) -> int:
    account = model.compiled.stats().pages
    return 0 if account is None else account.used


@torch.no_grad()
@pytest.mark.core
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_huggingfaces_to_the_last_bit(shape: tuple[int, int], models: Models, unpaged: list[Any]) -> None:
    ids, last = tokens(*shape), torch.tensor([shape[1] - 1, 0])
    calls: list[dict[str, Any]] = [{}, {"use_cache": False}, {"attention_mask": torch.ones_like(ids)}]
    calls += [{"position_ids": torch.arange(shape[1])[None] + 3}]
    for call in calls:
        ours, theirs = (model(input_ids=ids, **call) for model in reversed(models))
        assert torch.equal(ours.logits, theirs.logits)
        assert list(ours) == list(theirs)
    for keep in (1, last):  # products of fewer rows, with other kernels
        ours, theirs = (model(input_ids=ids, logits_to_keep=keep).logits for model in reversed(models))
        torch.testing.assert_close(ours, theirs)
    assert unpaged == [shape] * (len(calls) + 2)
    assert used_pages(models[1]) == 0


@torch.no_grad()
@pytest.mark.core
def test_a_cache_enters_pages_once_a_call_goes_on_with_it(models: Models) -> None:
    plain, wrapped = models
    ids, more = tokens(3, 11), tokens(3, 2)
    ours, theirs = wrapped(ids), plain(ids)
    assert (used_pages(wrapped), ours.past_key_values.get_seq_length()) == (0, 11)
    for mine, other in zip(ours.past_key_values, theirs.past_key_values, strict=True):
        torch.testing.assert_close(mine[:2], other[:2])
    assert used_pages(wrapped) == 9
    twin = copy.deepcopy(ours.past_key_values)
    for cache in (ours.past_key_values, twin):
        expected = plain(more, past_key_values=copy.deepcopy(theirs.past_key_values)).logits
        torch.testing.assert_close(wrapped(more, past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-4)
    del ours, twin, cache
    assert_account_is_empty(wrapped)


@torch.no_grad()
@pytest.mark.parametrize("start", [0, 3])
def test_generate_goes_on_from_a_forward(start: int, models: Models) -> None:
    """At the positions that follow those of the forward: others would take another path."""
    ids, positions = tokens(2, 11), torch.arange(start, start + 11)[None]
    caches = [model(ids[:, :9], position_ids=positions[:, :9]).past_key_values for model in models]
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options["position_ids"] = positions.expand(2, -1)
    theirs, ours = (
        model.generate(ids, past_key_values=cache, **options) for model, cache in zip(models, caches, strict=True)
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    assert models[1].compiled.stats().generate_calls == {"fast loop": 1}


@torch.no_grad()
def test_without_enough_pages_a_cache_waits_for_them(models: Models) -> None:
    wrapped = models[1]
    first, second = (wrapped(tokens(4, 64)).past_key_values for _ in range(2))  # each takes 64 of 100 pages
    assert used_pages(wrapped) == 0
    assert first.generate_loop.rows
    with pytest.raises(OutOfPagesError):
        wrapped(tokens(4, 1), past_key_values=second)
    assert used_pages(wrapped) == 64
    first.close()
    assert wrapped(tokens(4, 1), past_key_values=second).logits.shape == (4, 1, 128)


@torch.no_grad()
def test_a_model_sleeps_beside_caches_that_are_in_no_page(models: Models) -> None:
    wrapped = models[1]
    cache = wrapped(tokens(2, 9)).past_key_values
    with Engine(wrapped) as engine:
        engine.sleep(graphs=True)
        engine.wake()
        with pytest.raises(ValueError, match="this PagedCache belongs to another model, or to this one before"):
            wrapped(tokens(2, 1), past_key_values=cache)
        with pytest.raises(RuntimeError, match="were given back by sleep"):
            cache.crop(-1)


@torch.no_grad()
def test_other_calls_take_pages(models: Models, unpaged: list[Any]) -> None:
    plain, wrapped = models
    ids, mask = tokens(3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[1, :4] = 0
    embeddings = plain.get_input_embeddings()(ids)
    for call in (
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids, "output_hidden_states": True},
        {"inputs_embeds": embeddings},
        {"input_ids": ids[:1, :1]},
    ):
        assert wrapped(**call, use_cache=False).logits.shape[0] == len(next(iter(call.values())))
    assert wrapped.compiled.stats().forward_calls == {"compiled": 4}
    assert unpaged == []
