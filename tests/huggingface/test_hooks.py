"""Hooks on inner modules see what HuggingFace shows them; that they change what they do there: test_model_changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_full_backward_hook
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.compat.huggingface import let_outputs_be_captured
from support.execution.model_changes import before_a_layer, calling, on_a_layer
from support.huggingface.pairs import OPTIONS
from support.parity import greedy, next_turn
from support.tiny_models import ONE_LAYER, tiny_qwen3

pytestmark = pytest.mark.core


def test_recording_hooks_see_every_step_and_nothing_else(models, inputs):
    seen: tuple[list[Tensor], list[Tensor]] = ([], [])
    for model, outputs in zip(models, seen, strict=True):
        model.model.norm.register_forward_hook(lambda module, args, output, kept=outputs: kept.append(output))
    models[1].compiled.generate_loop()  # pages are allocated, and nothing runs for that
    for model in models:
        greedy(model, inputs, 5)
    assert [tuple(output.shape) for output in seen[1]] == [(3, 9, 64)] + [(3, 1, 64)] * 4
    torch.testing.assert_close(seen[1], seen[0])


def test_hooks_on_the_model_itself_fire_once_a_step_and_what_they_change_counts(models, inputs):
    fired: list[int] = []

    def ban_odd_tokens(module: Any, args: Any, output: Any) -> Any:
        fired.append(1)
        output.logits[..., 1::2] = -1e9
        return output

    handles = [model.register_forward_hook(ban_odd_tokens) for model in models]
    handles += [model.register_forward_pre_hook(lambda *_: fired.append(2)) for model in models]
    results = [greedy(model, inputs, 9) for model in models]
    torch.testing.assert_close(results[1], results[0])
    assert not (results[0][:, 9:] % 2).any()
    assert fired == [2, 1] * 9 * 2
    for handle in handles:
        handle.remove()
    theirs, ours = (greedy(model, inputs, 9) for model in models)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "register",
    [
        lambda layer: layer.register_full_backward_hook(_nothing),
        lambda layer: layer.register_full_backward_pre_hook(_nothing),
        lambda layer: register_module_full_backward_hook(_nothing),
    ],
    ids=["backward", "before backward", "all modules"],
)
def test_hooks_for_gradients_which_cannot_be_traced_slow_calls_until_they_are_gone(register, models, inputs):
    model = models[1]
    handle = register(model.model.layers[0])
    try:
        results = [greedy(each, inputs, 3) for each in models]
    finally:
        handle.remove()
    torch.testing.assert_close(results[1], results[0])
    greedy(model, inputs, 3)
    stats = model.compiled.stats()
    assert (stats.generate_calls, stats.slow_paths) == ({"original": 1, "fast loop": 1}, {"inner_hooks": 1})


def _nothing(*_: Any) -> None:
    pass


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_hooks_that_come_and_go_leave_compiled_steps_as_they_were(inputs):
    plain = tiny_qwen3(**ONE_LAYER)
    model = compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **{**OPTIONS, "mode": "compile", "progress": False})
    first = greedy(model, inputs, 6, return_dict_in_generate=True)
    cache = first.past_key_values
    graphs = model.compiled.stats().graphs
    with hooked(model, plain):
        torch.testing.assert_close(greedy(model, inputs, 6), greedy(plain, inputs, 6))
        with pytest.raises(ValueError, match=r"hooks are on inner modules \(.+\); that takes HuggingFace's own"):
            greedy(model, inputs, 6, past_key_values=cache)
        with pytest.raises(ValueError, match=r"hooks are on inner modules \(.+\); that takes HuggingFace's own"):
            model(torch.ones(3, 1, dtype=torch.long), past_key_values=cache)
    longer = next_turn(inputs, first, torch.full((3, 1), 7))
    torch.testing.assert_close(greedy(model, longer, 6), greedy(plain, {**longer, "past_key_values": None}, 6))
    assert model.compiled.stats().graphs == graphs


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_hooks_that_huggingface_leaves_behind_once_it_was_asked_for_hidden_states_slow_nothing(inputs):
    plain = tiny_qwen3(**ONE_LAYER)
    model = compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **{**OPTIONS, "mode": "compile", "progress": False})
    for before in (True, False):
        torch.testing.assert_close(greedy(model, inputs, 6), greedy(plain, inputs, 6))
        if before:
            graphs = model.compiled.stats().graphs
            let_outputs_be_captured(model, model)
    stats = model.compiled.stats()
    assert stats.generate_calls == {"fast loop": 2}
    assert stats.graphs == graphs


@contextmanager
def hooked(*models: PreTrainedModel) -> Iterator[None]:
    handles = [on_a_layer(model) for model in models]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- in the middle of a call


@pytest.mark.parametrize("put", [on_a_layer, lambda model: model.register_forward_hook(lambda *_: None)])
@pytest.mark.parametrize("how", ["stopping_criteria", "logits_processor"])
def test_hooks_that_a_callback_registers_are_refused_in_our_loops(how, put, models, inputs):
    plain, wrapped = models
    handles: list[Any] = []
    with pytest.raises(RuntimeError, match="forward hooks were registered while it was running"):
        greedy(wrapped, inputs, 8, **calling(lambda: handles.append(put(wrapped)), how))
    handles.pop().remove()
    torch.testing.assert_close(greedy(wrapped, inputs, 8), greedy(plain, inputs, 8))


def test_hooks_that_a_callback_registers_in_a_beam_search_see_what_follows(models, inputs):
    before = greedy(models[0], inputs, 8, num_beams=2)
    theirs, ours = (
        greedy(model, inputs, 8, num_beams=2, **calling(lambda model=model: on_a_layer(model), "logits_processor"))
        for model in models
    )
    torch.testing.assert_close(ours, theirs)
    assert not torch.equal(theirs, before)


@pytest.mark.parametrize("how", ["stopping_criteria", "logits_processor"])
def test_a_callback_may_change_hooks_where_the_call_runs_as_huggingfaces(how, models, inputs):
    results = []
    for model in models:
        handle = on_a_layer(model)

        def exchange(model: PreTrainedModel = model, handle: Any = handle) -> None:
            handle.remove()
            before_a_layer(model)

        results.append(greedy(model, inputs, 8, **calling(exchange, how)))
    torch.testing.assert_close(results[1], results[0])
