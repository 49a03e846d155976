"""Forwards that pass a wrapped model by are counted, said once, and have HuggingFace's results; our own are not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import compiled_llm
from support.huggingface.feature_calls import dynamic_cache, forward, generate, inputs, under_gradients
from support.huggingface.overriding import prefer_tokens
from support.huggingface.pairs import OPTIONS
from support.tiny_models import ONE_LAYER, tiny_qwen3

INNER, OUTER = "forward: inner_module", "forward: outer_compile"


@pytest.fixture
def model() -> Any:
    torch._dynamo.reset()
    return compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **OPTIONS)


def counts(model: Any) -> tuple[int, dict[str, int]]:
    stats = model.compiled.stats()
    slow = {name: count for name, count in stats.slow_paths.items() if name in (INNER, OUTER)}
    return stats.forward_calls.get("outside", 0), slow


def test_calls_of_the_module_inside_are_counted_said_once_and_explained(model, caplog):
    theirs = tiny_qwen3(**ONE_LAYER)
    for _ in range(3):
        ours = model.model(**inputs()).last_hidden_state
    torch.testing.assert_close(ours, theirs.model(**inputs()).last_hidden_state)
    assert counts(model) == (3, {INNER: 3})
    said = "because model.model was called by itself, which is HuggingFace's own code. Call model(...)"
    assert sum(said in record.getMessage() for record in caplog.records) == 1
    (finding,) = model.compiled.explain().data["findings"]
    assert "forward took a slower path, 3 times: model.model was called by itself" in finding["reason"]
    assert finding["advice"] == "Call model(...) or model.generate(...)."
    assert "3 outside" in str(model.compiled.stats())


@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
def test_our_own_calls_are_not_counted(mode, without_inductor):
    model = compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **{**OPTIONS, "mode": mode})
    calls = [
        *(generate(), generate(num_beams=2), generate(no_repeat_ngram_size=2), generate(use_cache=False)),
        *(generate(past_key_values=dynamic_cache(), num_beams=2), forward(), forward(past_key_values=dynamic_cache())),
        under_gradients,
    ]
    for call in calls:
        call(model)
    compiled_llm.kv_scales(model, [[5, 6, 7]])
    with compiled_llm.Engine(model) as engine:
        engine.generate([[5, 6, 7]])
    model.compiled.explain()
    undo = prefer_tokens(model)  # counted as that
    forward()(model)
    generate()(model)
    undo()
    assert counts(model) == (0, {})


def test_copies_count_their_own_calls_and_an_unwrapped_model_none(model):
    copied = copy.deepcopy(model)
    copied.model(**inputs())
    assert (counts(model), counts(copied)) == ((0, {}), (1, {INNER: 1}))
    runtime = model.compiled
    compiled_llm.unwrap(model).model(**inputs())
    assert runtime.stats().forward_calls == {}
    assert vars(model.model).keys() == vars(tiny_qwen3().model).keys()


@pytest.mark.whole
def test_each_graph_that_a_compiler_of_the_users_traces_is_counted_and_stays_whole(model, caplog):
    theirs = tiny_qwen3(**ONE_LAYER)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    with torch.no_grad():
        for length in (9, 9, 5, 9):
            ids = inputs((length,))["input_ids"]
            torch.testing.assert_close(compiled(ids).logits, theirs(ids).logits)
    assert counts(model) == (2, {OUTER: 2})
    said = "because a torch.compile or torch.export of yours traces HuggingFace's own forward. Call the wrapped model"
    assert sum(said in record.getMessage() for record in caplog.records) == 1
    step = torch.compile(lambda ids: model(ids).logits.argmax(-1), backend="eager", fullgraph=True)
    step(inputs((9,))["input_ids"])
    assert counts(model) == (3, {OUTER: 3})


@pytest.mark.whole
def test_the_module_inside_can_be_compiled_whole(model):
    compiled = torch.compile(model.model, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(**inputs())
    assert counts(model) == (2, {INNER: 2})
