"""Traced hooks read and steer compiled steps as plain hooks do HuggingFace's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiled_llm
from compiled_llm import Engine, SamplingParams
from compiled_llm.compilation.torch_compile.compile_error import CompileError
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.huggingface.pairs import OPTIONS, pair
from support.parity import assert_account_is_empty, greedy
from support.tiny_models import tiny_qwen3

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}
COMPILED: dict[str, Any] = {**OPTIONS, "mode": "compile", "progress": False}


class Steering:
    """A vector that is added to what a module gives, by a traced hook and by a plain one."""

    def __init__(self, seed: int) -> None:
        self.vector = torch.randn(64, generator=torch.Generator().manual_seed(seed))

    def traced(self, module: nn.Module, args: Any, output: Any, tokens: Any) -> Any:
        return (output[0] + self.vector, *output[1:]) if isinstance(output, tuple) else output + self.vector

    def plain(self, module: nn.Module, args: Any, output: Any) -> Any:
        return (output[0] + self.vector, *output[1:]) if isinstance(output, tuple) else output + self.vector


@pytest.fixture
def steering(seed: int) -> Steering:
    return Steering(seed)


MODULES = {"a layer": "model.layers.0", "attention": "model.layers.1.self_attn", "the norm": "model.norm"}


@pytest.mark.drawn(most=1)
@pytest.mark.core
@pytest.mark.parametrize("name", MODULES)
def test_a_hook_steers_every_way_of_generating_until_it_is_removed(name, inputs, models, steering):
    plain, wrapped = models
    before = greedy(plain, inputs, 7)
    ways: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"no_repeat_ngram_size": 2}]
    handle = plain.get_submodule(MODULES[name]).register_forward_hook(steering.plain)
    with compiled_llm.traced_hook(wrapped.get_submodule(MODULES[name]), steering.traced):
        for way in ways:
            assert torch.equal(greedy(wrapped, inputs, 7, **way), greedy(plain, inputs, 7, **way))
        with torch.no_grad():
            theirs, ours = (model(**inputs, use_cache=False).logits for model in models)
        seen = inputs["attention_mask"] != 0
        torch.testing.assert_close(ours[seen], theirs[seen], **CLOSE)
        assert not torch.equal(greedy(wrapped, inputs, 7), before)
    assert "original" not in wrapped.compiled.stats().generate_calls
    handle.remove()
    assert torch.equal(greedy(wrapped, inputs, 7), before)
    assert_account_is_empty(wrapped)


def test_what_a_hook_emits_is_in_results_in_huggingfaces_shapes(inputs):
    """Of prompts in chunks, of rows that end early, and of rows with the same prompt."""
    plain, wrapped = pair({"prefill_tokens": 16}, eos_token_id=list(range(64)))
    inputs = {name: tensor[[0, 1, 1, 2]] for name, tensor in inputs.items()}
    asked: dict[str, Any] = {"return_dict_in_generate": True}
    states = greedy(plain, inputs, 7, output_hidden_states=True, **asked).hidden_states
    seen = inputs["attention_mask"] != 0

    def read(module: nn.Module, args: Any, output: Tensor, tokens: Any) -> None:
        assert args[0].dim() == output.dim() == 2
        tokens.emit("before", args[0])
        tokens.emit("places", torch.stack([tokens.positions, tokens.rows], dim=1))

    with compiled_llm.traced_hook(wrapped.model.layers[1], read):
        out = greedy(wrapped, inputs, 7, **asked)
        with torch.no_grad():
            scored = wrapped(**inputs, use_cache=False)
    for step, (own, layers) in enumerate(zip(out.emitted["before"], states, strict=True)):
        of_step = seen if step == 0 else torch.ones(4, 1, dtype=torch.bool)
        torch.testing.assert_close(own[of_step], layers[1][of_step], **CLOSE)
    torch.testing.assert_close(scored.emitted["before"][seen], states[0][1][seen], **CLOSE)
    positions = [places[..., 0] for places in out.emitted["places"]]
    assert torch.equal(positions[0][seen], (seen.cumsum(1) - 1)[seen])
    assert torch.equal(positions[1][:, 0], seen.sum(1))
    assert len(set(scored.emitted["places"][1, :, 1].tolist())) == 1, "one row"
    assert "emitted" not in greedy(wrapped, inputs, 7, **asked)


def test_hidden_states_are_those_that_the_model_goes_on_with(inputs, models, steering):
    with compiled_llm.traced_hook(models[1].model.layers[0], steering.traced), torch.no_grad():
        steered = models[1](**inputs, output_hidden_states=True, use_cache=False).hidden_states
        plain = models[0](**inputs, output_hidden_states=True, use_cache=False).hidden_states
    seen = inputs["attention_mask"] != 0
    torch.testing.assert_close(steered[1][seen], plain[1][seen] + steering.vector, **CLOSE)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_the_first_call_may_ask_for_hidden_states(inputs, steering):
    """Before HuggingFace has put its own hooks on the model."""
    plain, wrapped = pair(COMPILED, num_hidden_layers=1)
    handle = plain.model.norm.register_forward_hook(steering.plain)
    with compiled_llm.traced_hook(wrapped.model.norm, steering.traced), torch.no_grad():
        theirs, ours = (model(**inputs, output_hidden_states=True).hidden_states[-1] for model in (plain, wrapped))
    handle.remove()
    seen = inputs["attention_mask"] != 0
    torch.testing.assert_close(ours[seen], theirs[seen], **CLOSE)


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_a_hook_is_compiled_once_and_what_it_holds_may_be_written_to(inputs, steering):
    plain, wrapped = pair(COMPILED, num_hidden_layers=1, eos_token_id=None)
    layer = plain.model.layers[0]
    layer.register_forward_hook(steering.plain)
    with compiled_llm.traced_hook(wrapped.model.layers[0], steering.traced):
        for _ in range(3):
            assert torch.equal(greedy(wrapped, inputs, 6), greedy(plain, inputs, 6))
            steering.vector.mul_(-0.7)
        stats = wrapped.compiled.stats()
        assert (stats.graphs, stats.recompiles, stats.graph_breaks) == (2, 0, 0)


@pytest.mark.usefixtures("without_inductor")
def test_a_captured_step_reads_what_a_hook_holds_now(monkeypatch, inputs, steering):
    """Also another tensor, which is elsewhere."""
    let_a_cpu_capture(monkeypatch)
    plain, wrapped = pair(COMPILED, num_hidden_layers=1, eos_token_id=None)
    plain.model.layers[0].register_forward_hook(steering.plain)
    with compiled_llm.traced_hook(wrapped.model.layers[0], steering.traced):
        for change in (None, "written", "another"):
            if change == "written":
                steering.vector.mul_(-0.7)
            elif change == "another":
                steering.vector = steering.vector.flip(0)
            assert torch.equal(greedy(wrapped, inputs, 6), greedy(plain, inputs, 6))
        assert any(row.replays for row in wrapped.compiled.cuda_graphs)


def test_another_tensor_in_a_hook_drops_captured_steps_and_a_written_one_only_texts(models, steering):
    version = models[1].compiled.facts.version
    with compiled_llm.traced_hook(models[1].model.layers[0], steering.traced):
        found = [(version.tensors, version.values)]
        for change in (lambda: steering.vector.mul_(2), lambda: setattr(steering, "vector", steering.vector.clone())):
            change()
            version.begin_check()
            found.append((version.tensors, version.values))
    (tensors, values), written, another = found
    assert written[0] == tensors
    assert written[1] != values
    assert another[0] != tensors


def test_an_engine_forgets_the_texts_that_were_computed_otherwise(inputs, models, steering):
    plain, wrapped = models
    prompt, params = inputs["input_ids"][1].tolist() * 2, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    ids = torch.tensor([prompt])

    def expected() -> list[int]:
        return plain.generate(ids, max_new_tokens=6, do_sample=False)[0, len(prompt) :].tolist()

    with Engine(wrapped) as engine:
        first = expected()
        assert engine.generate(prompt, params)[0].token_ids == first
        handle = plain.model.layers[0].register_forward_hook(steering.plain)
        with compiled_llm.traced_hook(wrapped.model.layers[0], steering.traced):
            assert engine.generate(prompt, params)[0].token_ids == expected() != first
            steering.vector.mul_(-2)
            assert engine.generate(prompt, params)[0].token_ids == expected()
        handle.remove()
        assert engine.generate(prompt, params)[0].token_ids == first


def test_a_copy_of_the_model_has_no_hooks_and_the_model_itself_none_either(inputs, models, steering):
    plain, wrapped = models
    with compiled_llm.traced_hook(wrapped.model.layers[0], steering.traced):
        assert not any(module._forward_hooks for module in wrapped.modules())
        assert torch.equal(greedy(copy.deepcopy(wrapped), inputs, 5), greedy(plain, inputs, 5))
    unwrapped = compiled_llm.unwrap(wrapped)
    assert torch.equal(greedy(unwrapped, inputs, 5), greedy(plain, inputs, 5))


# ---- bad input


def test_calls_that_would_leave_a_hook_out_are_refused(inputs, models, steering):
    wrapped = models[1]
    with compiled_llm.traced_hook(wrapped.model.layers[0], steering.traced):
        with pytest.raises(ValueError, match=r"generate: cache_implementation.*does not run traced hooks.*remove"):
            greedy(wrapped, inputs, 3, cache_implementation="offloaded")
        right = {name: tensor.flip(1) for name, tensor in inputs.items()}
        with pytest.raises(ValueError, match=r"generate: .*padded on the right.*traced hooks"):
            greedy(wrapped, right, 3)
        with pytest.raises(ValueError, match=r"forward: gradients.*traced hooks"):
            wrapped(**inputs)
    wrapped(**inputs)


@pytest.mark.usefixtures("without_inductor")
def test_a_hook_that_cannot_be_traced_is_named_with_its_line(inputs):
    wrapped = compiled_llm.wrap(tiny_qwen3(num_hidden_layers=1, eos_token_id=None), **COMPILED)

    def waits(module: nn.Module, args: Any, output: Tensor, tokens: Any) -> None:
        print(output.sum().item())

    with (
        compiled_llm.traced_hook(wrapped.model.layers[0], waits),
        pytest.raises(CompileError, match=r"test_traced_hooks\.py:\d+ in waits: `print\(output"),
    ):
        greedy(wrapped, inputs, 3)
    greedy(wrapped, inputs, 3)


def test_wrong_uses_are_refused_before_anything_changes(inputs, models, steering):
    plain, wrapped = models
    of_others: dict[str, tuple[Any, Any, type[Exception], str]] = {
        "not wrapped": (plain.model.layers[0], steering.traced, ValueError, "in no wrapped model; wrap"),
        "the model": (wrapped, steering.traced, ValueError, "the wrapped model itself"),
        "its head": (wrapped.lm_head, steering.traced, ValueError, "its language model head"),
        "no module": ("model.norm", steering.traced, TypeError, "'model.norm' is no torch.nn.Module"),
        "no function": (wrapped.model.norm, 3, TypeError, "function=3 cannot be called"),
    }
    for module, function, error, message in of_others.values():
        with pytest.raises(error, match=message):
            compiled_llm.traced_hook(module, function)
    assert not wrapped.compiled.facts.hooks


@pytest.mark.parametrize("wrong", ["a name twice", "no entry for each token", "other dimensions"])
def test_wrong_results_of_a_hook_are_named(wrong, inputs, models):
    def emits(module: nn.Module, args: Any, output: Tensor, tokens: Any) -> Any:
        if wrong == "other dimensions":
            return output[None]
        tokens.emit("mine", output if wrong == "a name twice" else output[:1].sum())
        tokens.emit("mine", output)
        return None

    messages = {"a name twice": "'mine' was emitted already", "no entry for each token": "an entry for each token"}
    with (
        compiled_llm.traced_hook(models[1].model.layers[0], emits),
        pytest.raises(ValueError, match=messages.get(wrong, "other dimensions")),
    ):
        greedy(models[1], inputs, 3)
    greedy(models[1], inputs, 3)
    assert_account_is_empty(models[1])


def test_a_module_that_is_gone_is_named(inputs, models, steering):
    wrapped = models[1]
    layer = wrapped.model.layers[0]
    layer.extra = nn.Identity()
    handle = compiled_llm.traced_hook(layer.extra, steering.traced)
    del layer.extra
    with pytest.raises(ValueError, match="has no module 'extra' any more; remove the hook"):
        greedy(wrapped, inputs, 3)
    handle.remove()
    handle.remove()
    greedy(wrapped, inputs, 3)
