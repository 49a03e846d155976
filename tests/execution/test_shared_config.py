"""Models that share one config object, in threads: each computes with its own attention, and the config stays whole."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.model.weights.weights_lock import WeightsLock
from support.execution.inside_steps import Calling, calling
from support.in_threads import PATIENCE, in_thread, start
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

OPTIONS: dict[str, Any] = {"page_size": 4, "kv_memory": "4000 tokens", "max_batch_size": 8, "progress": False}
SLOW = 0.002
"""Seconds that each layer takes longer, so that the threads' steps overlap."""


def sharing(config: Any, seed: int) -> PreTrainedModel:
    """A model of a config object, with weights of its own."""
    model = tiny_qwen3(seed, eos_token_id=None, attn_implementation="eager")
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = config
    return model


def original(model: PreTrainedModel, inputs: dict[str, Any], new_tokens: int) -> Any:
    """Greedy tokens by HuggingFace's own forward."""
    return greedy(model, inputs, new_tokens, output_attentions=True, return_dict_in_generate=True).sequences


def slowly(model: PreTrainedModel) -> PreTrainedModel:
    layer: Any = model.model.layers[0]
    layer.mlp = Calling(layer.mlp, lambda: time.sleep(SLOW))
    return model


@pytest.fixture
def config() -> Any:
    return tiny_qwen3(eos_token_id=None, attn_implementation="eager").config


@pytest.mark.whole
@pytest.mark.core
def test_threads_with_models_of_one_config_each_compute_with_their_own_attention(config, seed):
    """Two wrapped models, one of them also on its original path, and one that is not wrapped, all at once."""
    before = type(config), copy.deepcopy(config), config._attn_implementation
    first, second, plain = (slowly(sharing(config, number)) for number in range(3))
    inputs = mixed_prompts([5, 3], 128, seed)
    works: list[tuple[PreTrainedModel, Callable[[PreTrainedModel], Any]]] = [
        (first, lambda model: greedy(model, inputs, 20)),
        (second, lambda model: greedy(model, inputs, 20)),
        (first, lambda model: original(model, inputs, 20)),
        (plain, lambda model: greedy(model, inputs, 20)),
        (plain, lambda model: model(**inputs).logits.detach()),
    ]
    expected = [work(model) for model, work in works]
    for model in (first, second):
        compiled_llm.wrap(model, mode="eager", **OPTIONS)
    for _ in range(3):
        running = [start(lambda model=model, work=work: work(model)) for model, work in works]
        for future, result in zip(running, expected, strict=True):
            torch.testing.assert_close(future.result(timeout=PATIENCE), result)
    assert (type(config), config, config._attn_implementation) == before
    assert first.compiled.stats().generate_calls == {"fast loop": 3, "original": 3}
    assert_account_is_empty(first)
    assert_account_is_empty(second)


def test_what_other_threads_see_of_a_config_is_the_users(config, seed):
    """They may read, set and copy it in the midst of a step."""
    model, plain = (sharing(config, number) for number in range(2))
    inputs = mixed_prompts([5], 128, seed)
    expected = greedy(plain, inputs, 4)
    compiled_llm.wrap(model, mode="eager", **OPTIONS)
    seen: list[Any] = []

    def look() -> None:
        seen.append((config._attn_implementation, copy.deepcopy(plain)))
        plain.set_attn_implementation("sdpa")

    with calling(model, lambda: None if seen else in_thread(look)):
        greedy(model, inputs, 3)
    ((name, twin),) = seen
    assert name == twin.config._attn_implementation == "eager"
    assert type(twin.config) is type(config)
    assert config._attn_implementation == "sdpa"
    torch.testing.assert_close(greedy(twin, inputs, 4), expected)
    torch.testing.assert_close(greedy(plain, inputs, 4), expected)


def test_a_model_whose_attention_is_set_between_calls_keeps_its_tokens(config, seed):
    model = compiled_llm.wrap(sharing(config, 0), mode="eager", **OPTIONS)
    inputs = mixed_prompts([5, 3], 128, seed)
    expected = greedy(model, inputs, 8)
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        torch.testing.assert_close(greedy(model, inputs, 8), expected)
        torch.testing.assert_close(original(model, inputs, 8), expected)
        assert config._attn_implementation == name


def test_the_original_path_does_not_wait_for_a_compiled_step(config, seed):
    model = compiled_llm.wrap(sharing(config, 0), mode="eager", **OPTIONS)
    inputs = mixed_prompts([5], 128, seed)
    expected = model(**inputs).logits.detach()
    results: list[Any] = []

    def once() -> None:
        if not results:
            results.append(None)
            results[0] = in_thread(lambda: model(**inputs).logits.detach())

    with calling(model, once):
        greedy(model, inputs, 3)
    torch.testing.assert_close(results[0], expected)
    assert model.compiled.stats().generate_calls == {"fast loop": 1}


def test_weights_move_while_no_other_thread_reads_them():
    lock = WeightsLock()
    moving, moved = threading.Event(), threading.Event()

    def move() -> None:
        with lock.move(None):
            moving.set()
            moved.wait(PATIENCE)

    with lock.read(), lock.read(), lock.move(threading.get_ident()), lock.read():
        in_thread(lambda: None)
    with lock.read():
        mover = start(move)
        assert not moving.wait(0.05)
    assert moving.wait(PATIENCE)
    reader = start(lambda: lock.read().__enter__())
    time.sleep(0.05)
    assert not reader.done()
    moved.set()
    reader.result(timeout=PATIENCE)
    mover.result(timeout=PATIENCE)


def test_a_layer_that_was_copied_before_or_after_wrapping_attends_over_pages(config, seed):
    inputs = mixed_prompts([5, 3], 128, seed)
    layers = "model.layers"
    plain, model = sharing(config, 0), sharing(config, 0)
    for own in (plain, model):
        own.get_submodule(layers)[0] = copy.deepcopy(own.get_submodule(layers)[0])
    compiled_llm.wrap(model, mode="eager", **OPTIONS)
    expected = greedy(plain, inputs, 8)
    torch.testing.assert_close(greedy(model, inputs, 8), expected)
    model.get_submodule(layers)[1] = copy.deepcopy(model.get_submodule(layers)[1])  # and of its config
    torch.testing.assert_close(greedy(model, inputs, 8), expected)
    assert all(layer.self_attn.config._attn_implementation == "eager" for layer in model.get_submodule(layers))
