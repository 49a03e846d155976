"""A wrapped model's forward: scoring and embeddings over pages, HuggingFace's own where it has to be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

import compiled_llm
from compiled_llm.execution.state.staging import Staging
from support.huggingface.pairs import OPTIONS, pair
from support.noting import note_calls
from support.parity import assert_account_is_empty, mixed_prompts
from support.tiny_models import ONE_LAYER, TINY

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}
LENGTH = 11
FEW = {"kv_memory": "400 tokens", "max_batch_size": 4}


@pytest.fixture
def models() -> tuple[PreTrainedModel, PreTrainedModel]:
    return pair(FEW, eos_token_id=None)


def masks() -> dict[str, Tensor]:
    left = torch.ones(3, LENGTH, dtype=torch.long)
    left[0, :5] = left[2, :1] = 0
    holes = left.clone()
    holes[1, 3:5] = holes[2, 7] = 0
    return {"left": left, "right": left.flip(1), "holes": holes, "none": torch.ones_like(left)}


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 128, (3, LENGTH))


def assert_forwards(model: PreTrainedModel, **calls: int) -> None:
    assert model.compiled.stats().forward_calls == calls


def assert_equal_where_seen(ours: Any, theirs: Any, mask: Tensor) -> None:
    seen = mask[:, -theirs.logits.shape[1] :] != 0
    torch.testing.assert_close(ours.logits[seen], theirs.logits[seen], **CLOSE)
    assert not ours.logits[~seen].any()


@pytest.mark.core
@pytest.mark.parametrize("use_cache", [False, True, None])
@pytest.mark.parametrize("padding", masks())
def test_logits_are_huggingfaces_with_any_padding(padding, use_cache, models, ids):
    plain, wrapped = models
    mask = masks()[padding]
    for _ in range(2):
        with torch.no_grad():
            ours, theirs = (model(ids, attention_mask=mask, use_cache=use_cache) for model in (wrapped, plain))
        assert list(ours) == list(theirs)
        assert_equal_where_seen(ours, theirs, mask)
        del ours, theirs
        assert_account_is_empty(wrapped)
    assert_forwards(wrapped, compiled=2)
    assert wrapped.compiled.stats().slow_paths == {}


@pytest.mark.core
@pytest.mark.parametrize("padding", masks())
def test_the_loss_is_huggingfaces(padding, models, ids):
    wrapped = models[1]
    mask = masks()[padding]
    labels = ids.masked_fill(mask == 0, -100)
    follows_masked = (mask[:, :-1] == 0) & (labels[:, 1:] != -100)
    for own in (labels, torch.where(nn.functional.pad(follows_masked, (1, 0)), -100, labels), ids):
        with torch.no_grad():
            theirs, ours = (model(ids, mask, labels=own, use_cache=False) for model in models)
        torch.testing.assert_close(ours.loss, theirs.loss, **CLOSE)
        assert list(ours) == list(theirs)
    slow = {"left": 2, "right": 1, "holes": 2, "none": 0}[padding]
    calls = wrapped.compiled.stats().forward_calls
    assert (calls.get("original", 0), calls["compiled"]) == (slow, 3 - slow)
    if slow:
        assert wrapped.compiled.stats().slow_paths == {"forward: labels_masked": slow}
    assert_account_is_empty(wrapped)


def test_the_result_is_of_the_models_own_class():
    config = Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    plain = Qwen3MoeForCausalLM(config).eval()
    wrapped = compiled_llm.wrap(copy.deepcopy(plain), **OPTIONS)
    ids = torch.randint(3, 128, (2, LENGTH))
    with torch.no_grad():
        theirs, ours = (model(ids, labels=ids) for model in (plain, wrapped))
    assert type(ours) is type(theirs)
    assert list(ours) == list(theirs)
    assert ours.aux_loss is theirs.aux_loss is None
    torch.testing.assert_close(ours.loss, theirs.loss, **CLOSE)
    assert_forwards(wrapped, compiled=1)


def test_more_rows_than_a_batch_are_scored_in_parts(models):
    ids = torch.randint(3, 128, (11, 6))
    mask = torch.ones_like(ids)
    mask[::3, :2] = 0
    with torch.no_grad():
        theirs, ours = (model(ids, mask, use_cache=False) for model in models)
        assert_equal_where_seen(ours, theirs, mask)
        assert_forwards(models[1], compiled=1)
        kept = models[1](ids, mask)
        torch.testing.assert_close(kept.logits, theirs.logits, **CLOSE)
    assert models[1].compiled.stats().slow_paths == {"forward: max_batch_size": 1}


def test_what_finds_no_room_runs_in_huggingfaces_forward(models):
    plain, wrapped = models
    with torch.no_grad():
        for tokens, reason in ((1025, "out_of_positions"), (401, "out_of_pages")):
            ids = torch.randint(3, 128, (1, tokens))
            for use_cache in (True, False):
                ours = wrapped(ids, use_cache=use_cache, logits_to_keep=5)
                torch.testing.assert_close(ours.logits, plain(ids, logits_to_keep=5).logits, **CLOSE)
                assert (ours.past_key_values is not None) == use_cache
            assert f"forward: {reason}" in wrapped.compiled.stats().slow_paths
    assert_forwards(wrapped, original=4)
    assert_account_is_empty(wrapped)


@pytest.mark.core
def test_losses_of_the_last_tokens_are_huggingfaces_own(models, ids):
    with torch.no_grad():
        theirs, ours = (model(ids, labels=torch.full((3, 2), 7), logits_to_keep=2) for model in models)
    torch.testing.assert_close((ours.loss, ours.logits), (theirs.loss, theirs.logits), rtol=0, atol=0)
    assert_forwards(models[1], original=1)
    assert list(models[1].compiled.stats().slow_paths.values()) == [1]


@pytest.mark.core
def test_losses_may_be_divided_by_a_number_of_items(models, ids):
    """As HuggingFace's Trainer does."""
    with torch.no_grad():
        theirs, ours = (model(ids, labels=torch.full((3, LENGTH), 7), num_items_in_batch=9) for model in models)
    torch.testing.assert_close((ours.loss, ours.logits), (theirs.loss, theirs.logits), **CLOSE)
    assert_forwards(models[1], compiled=1)


@pytest.mark.parametrize("most", [32, 8])
def test_embeddings_around_holes_are_picked_by_one_upload_a_launch(most, ids, monkeypatch):
    """A copy from ordinary memory would wait for the device; those that follow one another need none."""
    plain, wrapped = pair({**FEW, "prefill_tokens": most}, eos_token_id=None)
    uploads = note_calls(monkeypatch, Staging, "to_device", lambda _, arrays, targets=(): [*map(list, arrays)])
    first, second = [0, 1, 2, 5, 6, 7, 8, 9, 10], [1, 2, 3, 4, 5, 6, 8, 9, 10]
    expected = {32: [[first, second]], 8: [[first[2:]], [second[1:]]]}[most]  # 6 tokens of another row come before
    mask = masks()["holes"]
    rows = {"inputs_embeds": plain.get_input_embeddings()(ids).detach(), "attention_mask": mask}
    with torch.no_grad():
        ours, theirs = (model(**rows, use_cache=True) for model in (wrapped, plain))
    assert_equal_where_seen(ours, theirs, mask)
    known = [lists[0] for lists in expected]
    assert [lists for lists in uploads if lists[0] in known] == expected


# ---- under grad


def test_frozen_weights_need_no_gradients(models, ids):
    for model in models:
        model.requires_grad_(False)
    theirs, ours = (model(ids, use_cache=False) for model in models)
    torch.testing.assert_close(ours.logits, theirs.logits, **CLOSE)
    assert_forwards(models[1], compiled=1)
    embeddings = models[0].get_input_embeddings()(ids).requires_grad_()
    models[1](inputs_embeds=embeddings).logits.sum().backward()
    assert embeddings.grad is not None
    assert_forwards(models[1], compiled=1, original=1)


# ---- compiled


@pytest.mark.slow
@pytest.mark.usefixtures("without_inductor")
def test_one_graph_for_tokens_and_one_for_embeddings():
    plain, wrapped = pair({"mode": "compile", "max_batch_size": 8, "progress": False}, **ONE_LAYER)
    embeddings = plain.get_input_embeddings()

    def score(lengths: list[int], seed: int) -> None:
        inputs = mixed_prompts(lengths, 128, seed)
        mask, rows = inputs["attention_mask"], {"inputs_embeds": embeddings(inputs["input_ids"]).detach()}
        with torch.no_grad():
            expected = plain(**inputs)
            assert_equal_where_seen(wrapped(**inputs, use_cache=False), expected, mask)  # without pages
            kept = wrapped.compiled.new_cache()
            assert_equal_where_seen(wrapped(**inputs, past_key_values=kept), expected, mask)
            assert_equal_where_seen(wrapped(**rows, attention_mask=mask), expected, mask)
        with torch.inference_mode():
            assert_equal_where_seen(wrapped(**rows, attention_mask=mask), expected, mask)

    score([5, 9], 0)
    with torch.compiler.set_stance("fail_on_recompile"):
        for seed, lengths in enumerate(([1], [7], [3, 3, 3], [20, 1, 9, 30])):
            score(lengths, seed)
    assert wrapped.compiled.graphs["prefill"] == wrapped.compiled.graphs["prefill from embeddings"] == 1
    assert wrapped.compiled.graphs["forward without pages"] == 1
    stats = wrapped.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles) == (0, 0)
    assert_account_is_empty(wrapped)
