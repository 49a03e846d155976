"""Caches in the user's hands: conversations go on where they ended, and caches do what HuggingFace's do."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import compiled_llm
from compiled_llm.execution.prefill.prefill import Prefill
from compiled_llm.huggingface.cache.cache_columns import row_updates, with_only_kept, with_updates
from compiled_llm.huggingface.cache.paged_cache import PagedCache
from compiled_llm.kvcache.pool import OutOfPagesError
from support.huggingface.callbacks import Raising
from support.huggingface.pairs import OPTIONS, pair
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}
PAD = 0


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each prefill or extension computed."""
    counts: list[int] = []
    run = Prefill.run

    def spied(self: Prefill, extensions: Any, *args: Any, **options: Any) -> Any:
        counts.append(sum(len(extension.ids) for extension in extensions))
        return run(self, extensions, *args, **options)

    monkeypatch.setattr(Prefill, "run", spied)
    return counts


def assert_all_given_back(model: PreTrainedModel, chats: Any = ()) -> None:
    for chat in chats:
        chat.cache = None
    gc.collect()
    assert_account_is_empty(model)


# ---- conversations


class Chat:
    """Turns of one model: each hands on the whole text, its mask, and the cache."""

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> None:
        self.model, self.options = model, options
        self.ids, self.mask = inputs["input_ids"], inputs["attention_mask"]
        self.cache: Any = None

    def answer(self, new_tokens: int, only_new: int | None = None) -> Tensor:
        ids = self.ids if only_new is None else self.ids[:, -only_new:]
        out = greedy(
            self.model,
            {"input_ids": ids, "attention_mask": self.mask},
            new_tokens,
            past_key_values=self.cache,
            return_dict_in_generate=True,
            **self.options,
        )
        self.cache = out.past_key_values
        new = out.sequences[:, ids.shape[1] :]
        self.ids = torch.cat([self.ids, new], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(new)], dim=1)
        return new

    def say(self, ids: Tensor, mask: Tensor) -> None:
        self.ids, self.mask = torch.cat([self.ids, ids], dim=1), torch.cat([self.mask, mask], dim=1)

    def hide_pads(self) -> None:
        self.mask = self.mask * (self.ids != PAD)


QUESTION_MASKS = {
    "whole": [[1, 1, 1, 1, 1]] * 3,
    "padded": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 0, 1], [0, 1, 1, 0, 1], [1, 1, 0, 0, 1]],
}


@pytest.mark.core
@pytest.mark.parametrize("loop", ["fast loop", "processed loop"])
@pytest.mark.parametrize("mask", QUESTION_MASKS)
def test_a_chat_goes_on_in_our_loops_with_huggingfaces_tokens(mask, loop, models, inputs, computed):
    options = {"no_repeat_ngram_size": 3} if loop == "processed loop" else {}
    chats = [Chat(model, inputs, **options) for model in models]
    hidden = torch.tensor(QUESTION_MASKS[mask])
    for turn in range(4):
        question = torch.randint(3, 128, (3, 5))
        if turn:
            for chat in chats:
                chat.say(question, hidden)
        theirs, ours = (chat.answer(6 + turn) for chat in chats)
        torch.testing.assert_close(ours, theirs)
        assert chats[1].cache.get_seq_length() == chats[0].cache.get_seq_length()
    assert models[1].compiled.stats().generate_calls == {loop: 4}
    # The last token of an answer was sampled but not stored; it comes with the next question.
    assert computed == [19] + [3 + int(hidden.sum())] * 3
    assert_all_given_back(models[1], chats=chats)


@pytest.mark.parametrize("hides", [False, True])
def test_a_chat_whose_rows_end_early(hides, reading, inputs):
    models = pair()
    eos = [int(token) for token in greedy(models[0], inputs, 12, eos_token_id=None)[[0, 2], [12, 16]]]
    chats = [Chat(model, inputs, eos_token_id=eos) for model in models]
    for _ in range(3):
        theirs, ours = (chat.answer(12) for chat in chats)
        torch.testing.assert_close(ours, theirs)
        question = torch.randint(3, 128, (3, 3))
        for chat in chats:
            if hides:
                chat.hide_pads()
            chat.say(question, torch.ones_like(question))
    assert (chats[0].ids == PAD).sum() > 5
    assert set(models[1].compiled.stats().generate_calls) == {"fast loop"}
    assert_all_given_back(models[1], chats=chats)


def test_only_new_tokens_may_be_given_with_the_mask_of_all(models, inputs):
    chats = [Chat(model, inputs) for model in models]
    for chat in chats:
        chat.answer(5)
        chat.say(torch.tensor([[7, 8, 9]] * 3), torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 1]]))
    theirs, ours = (chat.answer(8, only_new=4) for chat in chats)
    torch.testing.assert_close(ours, theirs)
    assert models[1].compiled.stats().generate_calls == {"fast loop": 2}


def test_a_chat_that_samples_stays_in_the_fast_loop_and_follows_the_seed(models, inputs):
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        cache, ids = None, inputs["input_ids"][1:2]
        for _ in range(3):
            out = models[1].generate(
                ids, past_key_values=cache, do_sample=True, top_k=40, max_new_tokens=5, return_dict_in_generate=True
            )
            cache, ids = out.past_key_values, torch.cat([out.sequences, torch.tensor([[9]])], dim=1)
        greedy(models[1], {"input_ids": ids}, 5, past_key_values=cache)  # and needs no sampling any more
        texts.append(ids)
    assert torch.equal(*texts)
    assert models[1].compiled.stats().generate_calls == {"fast loop": 8}
    slots = models[1].compiled.model_runner().state.slots
    assert len(slots._free) == slots.padding
    del cache, out
    assert_all_given_back(models[1])


def test_a_token_hidden_later_is_as_if_it_had_never_been_there(models, inputs):
    plain, wrapped = models
    chat = Chat(wrapped, inputs)
    chat.answer(6)
    chat.mask[1, 3] = chat.mask[2, 10] = 0
    chat.mask[0, :5] = 1  # and what was hidden is shown
    chat.say(torch.tensor([[5, 6]] * 3), torch.ones(3, 2, dtype=torch.long))
    expected = greedy(plain, {"input_ids": chat.ids, "attention_mask": chat.mask}, 7)
    torch.testing.assert_close(chat.answer(7), expected[:, -7:])
    assert wrapped.compiled.stats().generate_calls == {"fast loop": 2}


@pytest.mark.core
def test_two_live_caches_do_not_disturb_each_other(models):
    chats = [[Chat(model, mixed_prompts(lengths, 128, 1)) for model in models] for lengths in ([5, 3], [7, 2, 4])]
    for _ in range(3):
        for pairs in chats:
            question = torch.randint(3, 128, (len(pairs[0].ids), 2))
            for chat in pairs:
                chat.say(question, torch.ones_like(question))
            theirs, ours = (chat.answer(5) for chat in pairs)
            torch.testing.assert_close(ours, theirs)
    del pairs, chat
    chats.pop()
    gc.collect()
    assert models[1].compiled.stats().pages.used > 0
    chats.pop()
    assert_all_given_back(models[1])


@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 3}], ids=["fast loop", "processed loop"])
@pytest.mark.parametrize("after", [1, 2, 5])
def test_an_interrupted_call_leaves_the_cache_as_it_was(after, options, models, inputs):
    chats = [Chat(model, inputs) for model in models]
    for chat in chats:
        chat.answer(6)
        chat.say(torch.tensor([[7, 8, 9]] * 3), torch.ones(3, 3, dtype=torch.long))
    ours = chats[1]
    before = models[1].compiled.stats().pages, ours.cache.get_seq_length()
    with pytest.raises(KeyboardInterrupt):
        greedy(
            models[1], {"input_ids": ours.ids, "attention_mask": ours.mask}, 40,
            past_key_values=ours.cache, streamer=Raising(after, KeyboardInterrupt), **options,
        )  # fmt: skip
    assert (models[1].compiled.stats().pages, ours.cache.get_seq_length()) == before
    assert models[1].compiled.model_runner().pool.available == before[0].free
    torch.testing.assert_close(ours.answer(9), chats[0].answer(9))


# ---- what a mask changes, in plain numbers


def test_additions_keep_what_a_mask_leaves_as_it_is():
    stored = np.array([[0, 1, 1, 1], [1, 1, 1, 1], [1, 0, 1, 1]], dtype=bool)
    mask = np.array([[0, 1, 1, 1, 1, 0, 1], [1, 1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 1, 1]], dtype=bool)
    rows = row_updates(stored, mask, 0, 7)
    assert [(row.kept, row.unchanged, row.columns.tolist()) for row in rows] == [
        (3, 4, [4, 6]),
        (2, 2, [4, 5, 6]),
        (1, 1, [1, 2, 5, 6]),
    ]
    assert np.array_equal(with_updates(stored, rows, 7), mask)
    assert with_only_kept(stored, rows).astype(int).tolist() == [[0, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    with pytest.raises(ValueError, match="row 2 needs token 1 again"):
        row_updates(stored, mask, 4, 7)
    assert [row.columns.tolist() for row in row_updates(stored, None, 4, 6)] == [[4, 5]] * 3
    assert [row.columns.tolist() for row in row_updates(stored, mask[:, 4:], 4, 7)] == [[4, 6], [4, 5, 6], [5, 6]]


# ---- a cache does what HuggingFace's do


def reordered(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([2, 2, 0]))


def kept_in_order(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([0, 1, 2]))


def repeated(cache: Any) -> None:
    cache.batch_repeat_interleave(2)


def selected(cache: Any) -> None:
    cache.batch_select_indices(torch.tensor([1]))


def selected_by_mask(cache: Any) -> None:
    cache.batch_select_indices(torch.tensor([True, False, True]))


def cropped(cache: Any) -> None:
    cache.crop(-3)


def cropped_and_repeated(cache: Any) -> None:
    cache.crop(-5)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([5, 4, 4, 3, 0, 0]))
    cache.crop(0)


CHANGES = [reordered, kept_in_order, repeated, selected, selected_by_mask, cropped, cropped_and_repeated]


@pytest.mark.core
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_a_cache_changes_it_as_huggingfaces(change: Callable[[Any], None], models):
    caches = [DynamicCache(config=models[0].config), models[1].compiled.new_cache()]
    ids = torch.randint(3, 128, (3, 10))
    steps = [torch.randint(3, 128, (6, count)) for count in (1, 3, 1, 1, 6)]
    with torch.no_grad():
        for model, cache in zip(models, caches, strict=True):
            model(ids, past_key_values=cache)
            change(cache)
        assert caches[1].get_seq_length() == caches[0].get_seq_length()
        rows = len(caches[0].layers[0].keys)
        for step in steps:
            theirs, ours = (
                model(step[:rows], past_key_values=cache).logits for model, cache in zip(models, caches, strict=True)
            )
            torch.testing.assert_close(ours, theirs, **CLOSE)
        assert_same_contents(*caches)
    caches[1].close()
    assert_all_given_back(models[1])


def assert_same_contents(theirs: Any, ours: Any) -> None:
    assert len(ours) == len(theirs) == len(list(ours))
    for (keys, values, _), (their_keys, their_values, _) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(keys, their_keys, **CLOSE)
        torch.testing.assert_close(values, their_values, **CLOSE)
    for layer, their_layer in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(layer.keys, their_layer.keys, **CLOSE)
        assert layer.get_seq_length() == their_layer.get_seq_length()
        assert layer.is_initialized
        assert layer.is_croppable


def public(thing: Any) -> dict[str, Any]:
    """Its public attributes; deprecated names of HuggingFace's warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: getattr(thing, name) for name in dir(thing) if not name.startswith("_")}


@pytest.mark.core
def test_caches_and_their_layers_have_every_attribute_of_huggingfaces(models, inputs):
    with torch.no_grad():
        theirs, ours = (model(**inputs).past_key_values for model in models)
    assert isinstance(theirs, DynamicCache)
    layers = zip(theirs.layers, ours.layers, strict=True)
    for expected, actual in [map(public, both) for both in ((theirs, ours), *layers)]:
        assert expected.keys() - actual.keys() == set()
        for name in expected.keys() - {"keys", "values", "layers", "layer_class_to_replicate"}:
            assert callable(actual[name]) == callable(expected[name]), name
            assert callable(expected[name]) or actual[name] == expected[name], name


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("crop", (-1,)),
        ("reset", ()),
        ("reorder_cache", (torch.tensor([0, 0, 1]),)),
        ("batch_repeat_interleave", (2,)),
        ("batch_select_indices", (torch.tensor([0]),)),
        ("offload", ()),
    ],
)
def test_one_layer_alone_does_not_change(method, arguments, models, inputs):
    with torch.no_grad():
        cache = models[1](**inputs).past_key_values
    with pytest.raises(RuntimeError, match=f"{method}: the layers of a PagedCache share their rows"):
        getattr(cache.layers[1], method)(*arguments)
    assert cache.get_seq_length() == 9


def test_an_empty_cache_has_neither_keys_nor_values(models):
    cache = models[1].compiled.new_cache()
    assert [(keys, values) for keys, values, _ in cache] == [(None, None)] * 2
    assert not cache.is_initialized


def test_masked_tokens_have_zeros_for_keys(models, inputs):
    with torch.no_grad():
        cache = models[1](**inputs).past_key_values
    keys = cache.layers[1].keys
    assert keys.shape == (3, 2, 9, 16)
    masked = inputs["attention_mask"][:, None].expand(3, 2, 9) == 0
    assert not keys[masked].any()
    assert keys[~masked].any(dim=-1).all()


def test_cropping_counts_masked_tokens_and_gives_pages_back(models, inputs):
    plain, wrapped = models
    caches = []
    mask = inputs["attention_mask"]
    mask[0, 7] = 0
    with torch.no_grad():
        for model in models:
            caches.append(model(**inputs).past_key_values)
            used = None if model is plain else wrapped.compiled.stats().pages.used
            caches[-1].crop(-4)
        assert used is not None
        assert wrapped.compiled.stats().pages.used < used
        step, longer = torch.tensor([[5], [6], [7]]), torch.cat([mask[:, :5], torch.ones(3, 1, dtype=torch.long)], 1)
        rows = slice(1, None)  # of row 0, nothing is left to see
        theirs, ours = (
            model(step, longer, past_key_values=cache).logits for model, cache in zip(models, caches, strict=True)
        )
        torch.testing.assert_close(ours[rows], theirs[rows], **CLOSE)
        with pytest.raises(ValueError, match=r"crop: tokens_to_remove=-9.*6 tokens"):
            caches[1].crop(-9)
        caches[1].crop(-6)
    assert_account_is_empty(wrapped)


@pytest.mark.core
def test_a_deep_copy_shares_pages_and_goes_its_own_way(models, inputs):
    plain, wrapped = models
    inputs["attention_mask"][:] = 1
    with torch.no_grad():
        theirs, ours = (model(**inputs).past_key_values for model in models)
    used = wrapped.compiled.stats().pages.used
    copies = [(copy.deepcopy(theirs), copy.deepcopy(ours)) for _ in range(2)]
    assert wrapped.compiled.stats().pages.used == used
    for number, caches in enumerate([*copies, (theirs, ours)]):
        more = torch.full((3, 4), 10 + number)
        ids = torch.cat([inputs["input_ids"], more], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(more)], dim=1)
        expected, actual = (
            greedy(model, {"input_ids": ids, "attention_mask": mask}, 9, past_key_values=cache)
            for model, cache in zip((plain, wrapped), caches, strict=True)
        )
        torch.testing.assert_close(actual, expected)
    assert wrapped.compiled.stats().generate_calls == {"fast loop": 3}
    del theirs, ours, copies, caches
    assert_all_given_back(wrapped)


def test_a_row_in_the_decode_buffers_leaves_a_page_that_becomes_shared(models):
    """The copy changes which page a row has, and not how many."""
    plain, wrapped = models
    ids = torch.randint(3, 128, (2, 5))
    step = torch.tensor([[5], [6]])
    caches = [DynamicCache(config=plain.config), wrapped.compiled.new_cache()]
    with torch.no_grad():
        for model, cache in zip(models, caches, strict=True):
            model(ids, past_key_values=cache)
            model(step, past_key_values=cache)
        forks = [copy.deepcopy(cache) for cache in caches]
        for pairs in (caches, forks, caches):
            theirs, ours = (model(step, past_key_values=own).logits for model, own in zip(models, pairs, strict=True))
            torch.testing.assert_close(ours, theirs, **CLOSE)
            step = step + 1
    assert_same_contents(*caches)
    assert_same_contents(*forks)


def test_a_cache_repeated_beyond_the_batch_is_refused_and_stays_as_it_is(models):
    cache = models[1].compiled.new_cache()
    ids = torch.randint(3, 128, (3, 5))
    with torch.no_grad():
        models[1](ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"18 rows are more than max_batch_size=16"):
        cache.batch_repeat_interleave(6)
    assert [row.length for row in cache.generate_loop.rows] == [5, 5, 5]
    assert cache.get_seq_length() == 5


def test_a_cache_is_not_pickled_and_its_copy_is_no_pickle(models, inputs):
    with torch.no_grad():
        cache = models[1](**inputs).past_key_values
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(cache)


# ---- what a cache in pages cannot do is said before anything changes


def test_a_cache_of_another_model_is_refused(models, inputs):
    other = compiled_llm.wrap(tiny_qwen3(seed=1), **OPTIONS)
    with torch.no_grad():
        cache = other(**inputs).past_key_values
        length = cache.get_seq_length()
        with pytest.raises(ValueError, match="belongs to another model"):
            models[1](inputs["input_ids"], past_key_values=cache)
        with pytest.raises(ValueError, match="belongs to another model"):
            greedy(models[1], inputs, 3, past_key_values=cache)
        with pytest.raises(RuntimeError, match="belongs to the wrapped model that made it"):
            models[0](inputs["input_ids"], past_key_values=cache)
    assert cache.get_seq_length() == length


REFUSED = {
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "right padding": {"attention_mask": torch.tensor([[1] * 8 + [0]] * 3)},
    "cache_implementation": {"cache_implementation": "offloaded"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_pages_do_not_have_are_refused_with_a_paged_cache(name, models, inputs):
    cache = models[1].compiled.new_cache()
    with pytest.raises(ValueError, match=r"(?s)PagedCache; pass a DynamicCache|model_kwargs"):
        greedy(models[1], {**inputs, **REFUSED[name]}, 3, past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert_account_is_empty(models[1])


def test_a_mask_that_needs_a_token_that_is_not_at_hand_is_refused(models, inputs):
    with torch.no_grad():
        cache = models[1](**inputs).past_key_values
        mask = torch.ones(3, 10, dtype=torch.long)
        mask[1, 4] = 0
        before = models[1].compiled.stats().pages
        with pytest.raises(ValueError, match=r"row 0 needs token 0 again.*give the whole text"):
            models[1](torch.tensor([[5]] * 3), mask, past_key_values=cache)
    assert isinstance(cache, PagedCache)
    assert models[1].compiled.stats().pages == before
    assert cache.get_seq_length() == 9


def test_a_first_call_that_finds_no_pages_leaves_an_empty_cache_for_any_batch(models):
    cache = models[1].compiled.new_cache()
    with pytest.raises(OutOfPagesError):
        models[1](torch.randint(3, 128, (5, 1000)), past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert_account_is_empty(models[1])
    with torch.no_grad():
        ids = torch.randint(3, 128, (2, 6))
        torch.testing.assert_close(models[1](ids, past_key_values=cache).logits, models[0](ids).logits, **CLOSE)


def test_a_mask_with_columns_that_neither_cache_nor_call_has_is_refused(models, inputs):
    _, wrapped = models
    first = greedy(wrapped, inputs, 3, return_dict_in_generate=True)
    cache, mask = first.past_key_values, torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    with torch.no_grad():
        wide = torch.cat([mask, mask[:, :2]], 1)
        with pytest.raises(ValueError, match="attention_mask: 14 columns are more than the 11 of the cache and 1 new"):
            wrapped(first.sequences[:, -1:], wide, past_key_values=cache)
        wrapped(first.sequences[:, -1:], mask, past_key_values=cache)
    assert cache.get_seq_length() == first.sequences.shape[1]


def test_a_paged_cache_without_use_cache_is_refused(models, inputs):
    _, wrapped = models
    with pytest.raises(ValueError, match="use_cache=False, and past_key_values is a PagedCache; leave one"):
        greedy(wrapped, inputs, 3, use_cache=False, past_key_values=wrapped.compiled.new_cache())
    greedy(wrapped, inputs, 3)
    assert_account_is_empty(wrapped)
