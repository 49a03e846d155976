"""Loops of ``model(...)`` over a user's ``DynamicCache``: compiled steps, HuggingFace's logits and, on a look, tensors.

What is done to a cache between two steps is done to HuggingFace's tensors, and the next step goes on from those.
"""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

import compiled_llm
from support.huggingface.cache_name import CACHE
from support.huggingface.families import FAMILIES, make
from support.huggingface.pairs import OPTIONS, pair
from support.parity import assert_account_is_empty, greedy

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}
ROWS, PROMPT, STEPS = 3, 6, 7
MADE: dict[str, Callable[[Any], DynamicCache]] = {
    "configured": lambda config: DynamicCache(config=config),
    "lazy": lambda config: DynamicCache(),
}

Change = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def ids() -> Tensor:
    """``[3, 24]``, without padding; steps cross several pages of 4 tokens."""
    return torch.randint(3, 128, (ROWS, 24))


def steps_of(
    model: PreTrainedModel, cache: Any, ids: Tensor, sizes: Sequence[int], mask: Tensor | None = None, **options: Any
) -> list[Tensor]:
    """The logits of calls with so many tokens each, over one cache, after the tokens that it has."""
    logits = []
    for size in sizes:
        start = int(cache.get_seq_length())
        seen = {} if mask is None else {"attention_mask": mask[:, : start + size]}
        output = model(ids[:, start : start + size], past_key_values=cache, **seen, **options)
        assert output.past_key_values is cache
        logits.append(output.logits)
    return logits


def assert_same_contents(ours: Cache, theirs: Cache) -> None:
    assert ours.get_seq_length() == theirs.get_seq_length()
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        assert isinstance(layer, type(expected))
        torch.testing.assert_close((layer.keys, layer.values), (expected.keys, expected.values), **CLOSE)
        assert type(layer) is type(expected), "once it was looked at"


@pytest.mark.drawn(most=2)
@pytest.mark.core
@pytest.mark.parametrize("family", ["Qwen3", "Gemma3"])
@pytest.mark.parametrize("made", MADE)
def test_a_loop_of_steps(made, family, ids, seed):
    """Gemma's windows are shorter than the text."""
    models = pair() if family == "Qwen3" else _gemmas(seed)
    sizes = [PROMPT, *[1] * STEPS, 3, 1, 1]
    for _ in range(2):
        caches = [MADE[made](models[0].config) for _ in models]
        both = [steps_of(model, cache, ids, sizes) for model, cache in zip(models, caches, strict=True)]
        torch.testing.assert_close(both[1], both[0], **CLOSE)
        assert models[1].compiled.stats().pages.used > 0
        assert_same_contents(caches[1], caches[0])
        assert_account_is_empty(models[1])
    assert models[1].compiled.stats().forward_calls == {"compiled": 2 * len(sizes)}
    assert not models[1].compiled.stats().slow_paths


def _gemmas(seed: int) -> Sequence[PreTrainedModel]:
    plain, twin = (make("Gemma3", FAMILIES["Gemma3"], seed) for _ in range(2))
    return plain, compiled_llm.wrap(twin, **OPTIONS)


@pytest.mark.core
def test_steps_are_those_of_the_fast_loop_and_copy_no_cache(ids, monkeypatch):
    _, wrapped = pair()
    cache = DynamicCache(config=wrapped.config)
    steps_of(wrapped, cache, ids, [PROMPT])
    monkeypatch.setattr(type(wrapped.compiled.model_runner()), "fill", None)  # reads a cache into pages
    monkeypatch.setattr(type(wrapped.compiled.model_runner().state), "read", None)  # and out of them
    before = wrapped.compiled.model_runner().graph_manager.programs.graph_counts()
    steps_of(wrapped, cache, ids, [1] * STEPS)
    assert cache.get_seq_length() == PROMPT + STEPS
    after = wrapped.compiled.model_runner().graph_manager.programs.graph_counts()
    assert {name for name in after if after[name] != before.get(name)} <= {"decode"}


def _deepcopied(cache: DynamicCache) -> DynamicCache:
    return copy.deepcopy(cache)


def _saved(cache: DynamicCache) -> DynamicCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded: DynamicCache = torch.load(file, weights_only=False)
    return loaded


def _remade(cache: DynamicCache) -> DynamicCache:
    return DynamicCache([(keys, values) for keys, values, _ in cache])


def _scaled(cache: DynamicCache) -> DynamicCache:
    cache.layers[1].keys.mul_(1.5)
    return cache


def _replaced(cache: DynamicCache) -> DynamicCache:
    cache.layers[0].values = torch.ones(ROWS, *cache.layers[1].values.shape[1:])
    return cache


def _swapped(cache: DynamicCache) -> DynamicCache:
    cache.layers.reverse()
    return cache


def _done(change: Change) -> Change:
    def changed(cache: DynamicCache) -> DynamicCache:
        change(cache)
        return cache

    return changed


CHANGES: dict[str, Change] = {
    "crop": _done(lambda cache: cache.crop(-3)),
    "reorder": _done(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0]))),
    "reset": _done(lambda cache: cache.reset()),
    "deepcopy": _deepcopied,
    "save": _saved,
    "new cache": _remade,
    "in place": _scaled,
    "one layer": _replaced,
    "layers in another order": _swapped,
    "a look": _done(lambda cache: [layer.keys.sum() for layer in cache.layers[:1]]),
}


@pytest.mark.core
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_a_cache_holds_in_the_next_step(change, ids):
    models = pair()
    caches: list[Any] = [DynamicCache(config=models[0].config) for _ in models]
    for _ in range(2):
        for index, model in enumerate(models):
            steps_of(model, caches[index], ids, [PROMPT, 1, 1])
            caches[index] = CHANGES[change](caches[index])
        both = [steps_of(model, cache, ids, [1, 2]) for model, cache in zip(models, caches, strict=True)]
        torch.testing.assert_close(both[1], both[0], **CLOSE)
    assert_same_contents(caches[1], caches[0])
    assert models[1].compiled.stats().forward_calls == {"compiled": 10}
    assert_account_is_empty(models[1])


@pytest.mark.parametrize("change", ["batch_repeat_interleave", "batch_select_indices"])
def test_a_cache_with_other_rows_goes_on(change, ids):
    models = pair()
    caches = [DynamicCache(config=model.config) for model in models]
    chosen = torch.arange(ROWS).repeat_interleave(2) if change == "batch_repeat_interleave" else torch.tensor([2, 0])
    both = []
    for model, cache in zip(models, caches, strict=True):
        steps_of(model, cache, ids, [PROMPT, 1])
        getattr(cache, change)(2 if change == "batch_repeat_interleave" else chosen)
        both.append(steps_of(model, cache, ids[chosen], [1, 1]))
    torch.testing.assert_close(both[1], both[0], **CLOSE)
    assert models[1].compiled.stats().forward_calls == {"compiled": 4}


@pytest.mark.core
def test_a_copy_and_its_original_go_different_ways(ids):
    models = pair()
    both: list[list[Tensor]] = [[], []]
    for model, logits in zip(models, both, strict=True):
        cache = DynamicCache(config=model.config)
        steps_of(model, cache, ids, [PROMPT, 1])
        branch = copy.deepcopy(cache)
        for way in (cache, branch, cache, branch):
            logits += steps_of(model, way, ids if way is cache else ids.flip(0), [1])
    torch.testing.assert_close(both[1], both[0], **CLOSE)


@pytest.mark.core
def test_padded_prompts_and_masks_that_change(inputs):
    """HuggingFace's forward computes masked tokens, which its cache keeps; steps after them are compiled."""
    models, ids = pair(), torch.cat([inputs["input_ids"], torch.randint(3, 128, (3, 9))], dim=1)
    width = inputs["input_ids"].shape[1]
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 9, dtype=torch.long)], dim=1)
    caches = [DynamicCache(config=model.config) for model in models]

    def compare(seen: Tensor | None, sizes: Sequence[int]) -> None:
        both = [steps_of(model, cache, ids, sizes, seen) for model, cache in zip(models, caches, strict=True)]
        rows = torch.ones(3, dtype=torch.bool) if seen is None else seen[:, caches[0].get_seq_length() - 1] != 0
        torch.testing.assert_close(both[1][-1][rows, -1], both[0][-1][rows, -1], **CLOSE)

    compare(mask, [width, 1, 1, 1])
    mask[1, width + 1] = 0  # a token that was shown
    compare(mask, [1, 1])
    mask[1, width + 1] = 1  # and again is
    compare(mask, [1])
    mask[2, width + 6] = 0  # a new one
    compare(mask, [1, 1])
    compare(None, [1])  # all of them, padding too
    stats = models[1].compiled.stats()
    assert stats.forward_calls == {"compiled": 8, "original": 2}
    assert stats.slow_paths == {"forward: prefill": 2}
    assert_same_contents(caches[1], caches[0])


@pytest.mark.core
def test_other_calls_take_the_cache_in_turns(ids):
    """HuggingFace's own forward, ``generate``, beams, and the unwrapped model."""
    models = pair(eos_token_id=None)
    results = []
    for model in models:
        cache, found = DynamicCache(config=model.config), []
        found += steps_of(model, cache, ids, [PROMPT, 1])
        found += steps_of(model, cache, ids, [1], output_attentions=True)
        found += steps_of(model, cache, ids, [1])
        found += [greedy(model, {"input_ids": ids[:, :12]}, 4, past_key_values=cache)]
        found += steps_of(model, cache, ids, [1, 1])
        found += [greedy(model, {"input_ids": ids[:1, :20]}, 3, past_key_values=_two_beams(cache), num_beams=2)]
        found += steps_of(model, cache, ids, [1])
        found += steps_of(models[0], cache, ids, [1])
        found += steps_of(model, cache, ids, [1])
        results.append(found)
    torch.testing.assert_close(results[1], results[0], **CLOSE)
    assert models[1].compiled.stats().forward_calls == {"compiled": 7, "original": 1}
    assert models[1].compiled.stats().generate_calls == {"fast loop": 1, "original": 1}


def _two_beams(cache: DynamicCache) -> DynamicCache:
    """Of the first row."""
    beams = copy.deepcopy(cache)
    beams.batch_select_indices(torch.tensor([0, 0]))
    return beams


def test_what_a_call_asks_besides_logits(ids):
    models = pair()
    for options in ({"output_hidden_states": True}, {"logits_to_keep": 1}, {"labels": ids[:, :PROMPT]}):
        caches = [DynamicCache(config=model.config) for model in models]
        outs = [
            model(ids[:, :PROMPT], past_key_values=cache, **options)
            for model, cache in zip(models, caches, strict=True)
        ]
        assert list(outs[1]) == list(outs[0])
        pairs = [(outs[1][name], outs[0][name]) for name in outs[0] if name != CACHE]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, **CLOSE)
        assert outs[1].past_key_values is caches[1]
    ours, theirs = (
        model(ids[:, :PROMPT], past_key_values=DynamicCache(), use_cache=False, return_dict=False) for model in models
    )
    assert len(ours) == len(theirs) == 1
    assert models[1].compiled.stats().forward_calls == {"compiled": 4}


@pytest.mark.parametrize(
    ("name", "cache", "rows"),
    [
        ("past_key_values", lambda config: StaticCache(config=config, max_cache_len=32), ROWS),
        ("past_key_values", lambda config: type("Own", (DynamicCache,), {})(config=config), ROWS),
        ("max_batch_size", lambda config: DynamicCache(), 17),
        ("out_of_pages", lambda config: DynamicCache(), 16),
    ],
    ids=["static", "own class", "rows", "pages"],
)
def test_what_pages_do_not_serve_is_huggingfaces_and_counted(name, cache, rows):
    models, given = pair({"kv_memory": "64 tokens"}), torch.randint(3, 128, (rows, 7))
    both = []
    for model in models:
        own = cache(model.config)
        both.append([model(given[:, part], past_key_values=own).logits for part in (slice(0, 6), slice(6, 7))])
    torch.testing.assert_close(both[1], both[0], **CLOSE)
    assert models[1].compiled.stats().slow_paths == {f"forward: {name}": 2}


def test_pages_run_out_in_the_middle(ids):
    """The cache moves out of its pages, and HuggingFace's forward goes on."""
    models = pair({"kv_memory": "28 tokens"})
    caches = [DynamicCache(config=model.config) for model in models]
    both = [steps_of(model, cache, ids, [PROMPT, 1, 1, 1, 1]) for model, cache in zip(models, caches, strict=True)]
    torch.testing.assert_close(both[1], both[0], **CLOSE)
    stats = models[1].compiled.stats()
    assert stats.forward_calls == {"compiled": 3, "original": 2}
    assert stats.slow_paths == {"forward: out_of_pages": 2}
    assert_same_contents(caches[1], caches[0])
    assert_account_is_empty(models[1])


def test_a_look_that_finds_no_memory_loses_nothing(ids, monkeypatch):
    models = pair()
    caches = [DynamicCache(config=model.config) for model in models]
    both = [steps_of(model, cache, ids, [PROMPT, 1]) for model, cache in zip(models, caches, strict=True)]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", _out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            caches[1].layers[0].keys  # noqa: B018
    both = [steps_of(model, cache, ids, [1]) for model, cache in zip(models, caches, strict=True)]
    torch.testing.assert_close(both[1], both[0], **CLOSE)
    assert_same_contents(caches[1], caches[0])


def _out_of_memory(*_: Any, **__: Any) -> Tensor:
    raise torch.OutOfMemoryError


def test_gradients_through_a_cache_are_huggingfaces(ids):
    models = pair()
    gradients = []
    for model in models:
        model.requires_grad_(False)
        cache = DynamicCache(config=model.config)
        steps_of(model, cache, ids, [PROMPT])
        for layer in cache.layers:
            layer.keys.requires_grad_()
        first = cache.layers[0].keys
        with torch.enable_grad():
            model(ids[:, PROMPT : PROMPT + 1], past_key_values=cache).logits.sum().backward()
        gradients.append(first.grad)
    torch.testing.assert_close(gradients[1], gradients[0], **CLOSE)
    assert models[1].compiled.stats().slow_paths == {"forward: past_key_values": 1}


def test_a_cache_outlives_the_pages_that_it_lies_in(ids):
    """A model of another type has other pages; a cache that is dropped gives its own back at once."""
    models = pair()
    caches = [DynamicCache(config=model.config) for model in models]

    def both(sizes: Sequence[int]) -> list[list[Tensor]]:
        return [steps_of(model, cache, ids, sizes) for model, cache in zip(models, caches, strict=True)]

    first = both([PROMPT, 1])
    runner = models[1].compiled.model_runner()
    models[1].double()
    models[1](ids)
    models[1].float()
    second = both([1])
    assert models[1].compiled.model_runner() is not runner
    third = both([1, 1])
    for theirs, ours in (first, second, third):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    assert models[1].compiled.stats().forward_calls == {"compiled": 6}
    assert models[1].compiled.stats().pages.used > 0
    gc.disable()
    try:
        caches.clear()
        assert_account_is_empty(models[1])
    finally:
        gc.enable()
