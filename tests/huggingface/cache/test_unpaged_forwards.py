"""Forwards of new rows need no pages on a CPU: their bits are HuggingFace's, and their cache enters pages when used."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import Engine
from compiled_llm.execution.prefill.unpaged import Unpaged
from compiled_llm.kvcache.errors import OutOfPagesError
from support.huggingface.families import FAMILIES, make
from support.huggingface.pairs import OPTIONS, Models, pair
from support.parity import assert_account_is_empty

PADDED_FAMILIES = ["GPT2LMHead", "GPTNeoX", "Gemma", "Mistral", "Mixtral", "OPT"]
"""They differ in positions, in norms, in heads, and in how experts take tokens."""
SHAPES = [(1, 2), (1, 16), (1, 70), (2, 1), (3, 11), (4, 64)]


@pytest.fixture
def models() -> Models:
    return pair({"kv_memory": "400 tokens", "max_batch_size": 4}, eos_token_id=None)


@pytest.fixture
def unpaged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of forwards that have run without pages."""
    shapes: list[tuple[int, ...]] = []
    run = Unpaged.run

    def noted(self: Unpaged, ids: Any, positions: Any, shown: Any, keep: Any) -> Any:
        shapes.append(shown.shape)
        return run(self, ids, positions, shown, keep)

    monkeypatch.setattr(Unpaged, "run", noted)
    return shapes


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 128, shape)


def masks_with_padding() -> Iterator[Tensor]:
    """Yield ``[4, 7]`` masks: padding on the left, on the right, between tokens, and a row of nothing else."""
    columns, padding = torch.arange(7), torch.tensor([3, 0, 6, 1])[:, None]
    yield (columns >= padding).long()
    yield (columns < 7 - padding).long()
    yield torch.tensor([[1, 0, 1, 1, 0, 0, 1]]).repeat(4, 1)
    yield torch.tensor([1, 0, 1, 0])[:, None].repeat(1, 7)


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
@pytest.mark.parametrize("family", PADDED_FAMILIES)
def test_padding_is_not_computed(family: str, unpaged: list[Any]) -> None:
    plain, wrapped = (make(family, FAMILIES[family], seed=0) for _ in range(2))
    compiled_llm.wrap(wrapped, **OPTIONS)
    ids = tokens(4, 7)
    for mask in masks_with_padding():
        for keep in (0, 2, torch.tensor([6, 0, 6])):
            ours, theirs = (model(ids, attention_mask=mask, logits_to_keep=keep).logits for model in (wrapped, plain))
            shown = mask[:, keep if isinstance(keep, Tensor) else slice(-keep, None)].bool()
            torch.testing.assert_close(ours[shown], theirs[shown], rtol=1e-4, atol=1e-4)
            assert not ours[~shown].any()
    assert unpaged == [(4, 7)] * 12
    assert used_pages(wrapped) == 0


@torch.no_grad()
def test_a_padded_cache_enters_pages_without_its_padding(models: Models) -> None:
    for mask in list(masks_with_padding())[:3]:
        ids, more, longer = tokens(4, 7), tokens(4, 2), torch.cat([mask, torch.ones(4, 2, dtype=torch.long)], dim=1)
        theirs, ours = (model(ids, attention_mask=mask).past_key_values for model in models)
        for mine, other in zip(ours, theirs, strict=True):
            shown = mask.bool()[:, None, :, None].expand_as(mine[0])
            torch.testing.assert_close([part[shown] for part in mine[:2]], [part[shown] for part in other[:2]])
        expected, found = (
            model(more, attention_mask=longer, past_key_values=cache).logits
            for model, cache in zip(models, (theirs, ours), strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


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
@pytest.mark.parametrize(("start", "padding"), [(0, 0), (3, 0), (0, 4)])
def test_generate_goes_on_from_a_forward(start: int, padding: int, models: Models) -> None:
    """At the positions that follow those of the forward: others would take another path."""
    ids, mask = tokens(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[1, :padding] = 0
    positions = start + (mask.cumsum(dim=1) - 1).clamp(min=0)
    first = {"attention_mask": mask[:, :9], "position_ids": positions[:, :9]}
    caches = [model(ids[:, :9], **first).past_key_values for model in models]
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    theirs, ours = (
        model.generate(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, **options)
        for model, cache in zip(models, caches, strict=True)
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
    ids = tokens(3, 11)
    embeddings = plain.get_input_embeddings()(ids)
    for call in (
        {"input_ids": ids, "output_hidden_states": True},
        {"inputs_embeds": embeddings},
        {"input_ids": ids[:1, :1]},
    ):
        assert wrapped(**call, use_cache=False).logits.shape[0] == len(next(iter(call.values())))
    assert wrapped.compiled.stats().forward_calls == {"compiled": 3}
    assert unpaged == []
