"""Caches in the user's hands: conversations go on where they ended, and caches do what HuggingFace's do."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
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
from compiled_llm.kvcache.errors import OutOfPagesError
from support.huggingface.cache_name import CACHE
from support.huggingface.callbacks import Raising
from support.huggingface.pairs import OPTIONS, pair
from support.noting import note_calls
from support.parity import assert_account_is_empty, greedy
from support.tiny_models import tiny_qwen3

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}
THEIRS = "(?s)PagedCache; pass a DynamicCache|model_kwargs"
BAD: Any = (ValueError, IndexError)
PAD = 0


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each prefill or extension computed."""
    return note_calls(monkeypatch, Prefill, "run", lambda self, batch, *_, **__: sum(len(entry.ids) for entry in batch))


def assert_all_given_back(model: PreTrainedModel, chats: Any = ()) -> None:
    for chat in chats:
        chat.cache = None
    gc.collect()
    assert_account_is_empty(model)


def test_a_call_gets_the_pages_of_a_cache_that_only_a_cycle_holds() -> None:
    """As that of a call whose frames are in one: torch leaves such cycles where a call waits for a compiler."""
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), **{**OPTIONS, "kv_memory": "64 tokens"})
    ids = torch.randint(3, 128, (1, 20))
    gc.disable()
    try:
        holder: dict[str, Any] = {"cache": greedy(model, {"input_ids": ids}, 30, return_dict_in_generate=True)}
        holder["itself"] = holder
        del holder
        account = model.compiled.stats().pages
        assert account.used > account.free
        assert greedy(model, {"input_ids": ids}, 30).shape == (1, 50)
    finally:
        gc.enable()
    assert_account_is_empty(model)


@pytest.mark.parametrize("forwards", [0, 3], ids=["generate", "forward"])
def test_a_cache_that_is_kept_keeps_no_model_alive(forwards: int) -> None:
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), **{**OPTIONS, "mode": "eager"})
    ids = torch.tensor([[5, 6, 7, 8]])
    cache = model.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True).past_key_values
    for _ in range(forwards):
        model(torch.tensor([[9]]), **{CACHE: cache})
    layers = weakref.ref(model.model)
    del model
    gc.collect()
    assert layers() is None
    assert cache.get_seq_length() == 11 + forwards


@torch.no_grad()
def test_positions_that_skip_some_between_tokens_are_followed(models, seed):
    """Of rows that stay where they are in the decode buffers."""
    caches = [DynamicCache(config=models[0].config) for _ in models]
    generator = torch.Generator().manual_seed(seed)
    for positions in ([0, 1, 2, 3], [4], [5], [11], [12], [7], [8]):
        ids = torch.randint(3, 128, (1, len(positions)), generator=generator)
        own = {"position_ids": torch.tensor([positions])}
        plain, ours = (model(ids, **{CACHE: kept}, **own).logits for model, kept in zip(models, caches, strict=True))
        torch.testing.assert_close(ours[:, -1], plain[:, -1], **CLOSE)


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


@pytest.mark.drawn(most=3)
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


def cropped_and_repeated(cache: Any) -> None:
    cache.crop(-5)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([5, 4, 4, 3, 0, 0]))
    cache.crop(0)


CHANGES: dict[str, Callable[[Any], None]] = {
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])),
    "kept in order": lambda cache: cache.reorder_cache(torch.tensor([0, 1, 2])),
    "repeated": lambda cache: cache.batch_repeat_interleave(2),
    "selected": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "selected by mask": lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])),
    "cropped": lambda cache: cache.crop(-3),
    "cropped and repeated": cropped_and_repeated,
}


@pytest.mark.core
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
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
    caches = [DynamicCache(config=plain.config), wrapped.compiled.new_cache()]
    mask = inputs["attention_mask"]
    mask[0, 7] = 0
    with torch.no_grad():
        for model, cache in zip(models, caches, strict=True):
            model(**inputs, past_key_values=cache)
        used = wrapped.compiled.stats().pages.used
        for cache in caches:
            cache.crop(-4)
        assert wrapped.compiled.stats().pages.used < used
        step, longer = torch.tensor([[5], [6], [7]]), torch.cat([mask[:, :5], torch.ones(3, 1, dtype=torch.long)], 1)
        rows = slice(1, None)  # of row 0, nothing is left to see
        theirs, ours = (
            model(step, longer, past_key_values=cache).logits for model, cache in zip(models, caches, strict=True)
        )
        torch.testing.assert_close(ours[rows], theirs[rows], **CLOSE)
        caches[1].crop(-6)
    assert_account_is_empty(wrapped)


def test_a_deep_copy_shares_pages_until_one_of_them_goes_on(models):
    """A row in the decode buffers leaves its page: the copy changes which page a row has, and not how many."""
    plain, wrapped = models
    ids = torch.randint(3, 128, (2, 5))
    step = torch.tensor([[5], [6]])
    caches = [DynamicCache(config=plain.config), wrapped.compiled.new_cache()]
    with torch.no_grad():
        for model, cache in zip(models, caches, strict=True):
            model(ids, past_key_values=cache)
            model(step, past_key_values=cache)
        used = wrapped.compiled.stats().pages.used
        forks = [copy.deepcopy(cache) for cache in caches]
        assert wrapped.compiled.stats().pages.used == used
        for pairs in (caches, forks, caches):
            theirs, ours = (model(step, past_key_values=own).logits for model, own in zip(models, pairs, strict=True))
            torch.testing.assert_close(ours, theirs, **CLOSE)
            step = step + 1
    assert_same_contents(*caches)
    assert_same_contents(*forks)
    text = torch.randint(3, 128, (2, 9))  # of which the copies hold seven columns
    answers = [
        greedy(model, {"input_ids": text}, 5, past_key_values=own) for model, own in zip(models, forks, strict=True)
    ]
    torch.testing.assert_close(*answers)
    del caches, cache, forks, pairs
    assert_all_given_back(wrapped)


# ---- what a cache in pages cannot do is said before anything changes

Refused = Callable[[Any, Any, dict[str, Tensor]], Any]


def forward(cut: Callable[[Tensor], Tensor] = lambda ids: ids, mask: Any = None, **options: Any) -> Refused:
    return lambda model, cache, inputs: model(cut(inputs["input_ids"]), mask, past_key_values=cache, **options)


def generate(**options: Any) -> Refused:
    return lambda model, cache, inputs: greedy(model, {**inputs, **options}, 3, past_key_values=cache)


def another() -> Any:
    return compiled_llm.wrap(tiny_qwen3(seed=1), **OPTIONS)


BAD_IDS = {
    "too large": torch.tensor([[3, 500]]),
    "none": torch.zeros(1, 0, dtype=torch.long),
    "floats": torch.ones(1, 1),
}
OVER_AN_EMPTY_ONE: dict[str, tuple[Refused, type[Exception], str]] = {
    "hidden states after right padding": (
        generate(attention_mask=torch.tensor([[1] * 8 + [0]] * 3), output_hidden_states=True),
        ValueError,
        THEIRS,
    ),
    "right padding": (generate(attention_mask=torch.tensor([[1] * 8 + [0]] * 3)), ValueError, THEIRS),
    "cache_implementation": (generate(cache_implementation="offloaded"), ValueError, THEIRS),
    "use_cache=False": (
        generate(use_cache=False),
        ValueError,
        f"use_cache=False, and {CACHE} is a PagedCache; leave one",
    ),
    "router logits of a forward": (
        forward(output_router_logits=True),
        ValueError,
        "output_router_logits.*DynamicCache",
    ),
    "too few pages": (forward(lambda ids: torch.randint(3, 128, (5, 1000))), OutOfPagesError, "pages"),
    "a column that is not there": (forward(logits_to_keep=torch.tensor([9])), IndexError, "out of"),
    **{f"ids: {name}": (forward(lambda _, ids=ids: ids), BAD, "input_ids|token") for name, ids in BAD_IDS.items()},
}
OF_ONE_LAYER = {
    "crop": (-1,),
    "reset": (),
    "reorder_cache": (torch.tensor([0, 0, 1]),),
    "batch_repeat_interleave": (2,),
    "batch_select_indices": (torch.tensor([0]),),
    "offload": (),
}
OVER_A_FILLED_ONE: dict[str, tuple[Refused, type[Exception], str]] = {
    **{
        f"{method} of one layer": (
            lambda model, cache, inputs, method=method: getattr(cache.layers[1], method)(*OF_ONE_LAYER[method]),
            RuntimeError,
            f"{method}: the layers of a PagedCache share their rows",
        )
        for method in OF_ONE_LAYER
    },
    "pickle": (lambda model, cache, inputs: pickle.dumps(cache), TypeError, "cannot be pickled"),
    "more copies than a batch": (
        lambda model, cache, inputs: cache.batch_repeat_interleave(6),
        ValueError,
        "18 rows are more than max_batch_size=16",
    ),
    "more cropped than there is": (
        lambda model, cache, inputs: cache.crop(-10),
        ValueError,
        "crop: tokens_to_remove=-10.*9 tokens",
    ),
    "another model": (
        lambda model, cache, inputs: forward()(another(), cache, inputs),
        ValueError,
        "belongs to another model",
    ),
    "generate of another model": (
        lambda model, cache, inputs: generate()(another(), cache, inputs),
        ValueError,
        "belongs to another model",
    ),
    "the model unwrapped": (
        lambda model, cache, inputs: forward()(tiny_qwen3(), cache, inputs),
        RuntimeError,
        "belongs to the wrapped model that made it",
    ),
    "other rows": (forward(lambda ids: ids[:2, :1]), ValueError, "2 rows do not fit a cache of 3"),
    "too many positions": (forward(lambda ids: ids[:, :1].expand(3, 1020)), ValueError, "1024 positions"),
    "a token that is not at hand": (
        forward(lambda ids: ids[:, :1], torch.tensor([[1] * 10, [1] * 4 + [0] + [1] * 5, [1] * 10])),
        ValueError,
        "row 0 needs token 0 again.*give the whole text",
    ),
    "columns that are not there": (
        forward(lambda ids: ids[:, :1], torch.ones(3, 12, dtype=torch.long)),
        ValueError,
        "attention_mask: 12 columns are more than the 9 of the cache and 1 new",
    ),
    "positions that are not whole": (
        lambda model, cache, inputs: model(
            inputs["input_ids"][:, :1], past_key_values=cache, position_ids=torch.full((3, 1), 8.5)
        ),
        ValueError,
        "position_ids are not whole numbers.*pass a DynamicCache",
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", [*OVER_AN_EMPTY_ONE, *OVER_A_FILLED_ONE])
def test_what_a_cache_refuses_changes_nothing_and_it_goes_on(name, models, inputs):
    plain, wrapped = models
    caches, mask = [DynamicCache(config=plain.config), wrapped.compiled.new_cache()], inputs["attention_mask"]
    if name in OVER_A_FILLED_ONE:
        for model, cache in zip(models, caches, strict=True):
            model(**inputs, past_key_values=cache)
        given = inputs["input_ids"][:, 4:5], torch.cat([mask, mask[:, -1:]], dim=1)
    else:
        given = inputs["input_ids"][:2, -4:], mask[:2, -4:]
    call, error, message = {**OVER_AN_EMPTY_ONE, **OVER_A_FILLED_ONE}[name]
    rows, pages = caches[1].generate_loop.rows, wrapped.compiled.stats().pages
    before = [row.exact_length for row in rows], caches[1].get_seq_length()
    with pytest.raises(error, match=message):
        call(wrapped, caches[1], inputs)
    assert ([row.exact_length for row in rows], caches[1].get_seq_length()) == before
    assert pages in (None, wrapped.compiled.stats().pages)
    if pages is None and wrapped.compiled.stats().pages is not None:
        assert_account_is_empty(wrapped)
    theirs, ours = (model(*given, past_key_values=cache).logits for model, cache in zip(models, caches, strict=True))
    torch.testing.assert_close(ours, theirs, **CLOSE)
