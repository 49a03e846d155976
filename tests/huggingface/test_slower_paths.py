"""What the fast loop cannot do gives HuggingFace's result all the same, on a slower path, counted and logged once."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import compiled_llm
from support.huggingface.pairs import OPTIONS, pair
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_llama, tiny_qwen3

pytestmark = pytest.mark.core


class Halve(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, ::2] -= 3
        return scores


WITH_PROCESSORS = {
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "watermarks": {"watermarking_config": {"bias": 2.5}},
    "a processor of one's own": {"logits_processor": LogitsProcessorList([Halve()])},
    "output_scores": {"return_dict_in_generate": True, "output_scores": True, "watermarking_config": {"bias": 2.5}},
    "output_logits": {"return_dict_in_generate": True, "output_logits": True, "no_repeat_ngram_size": 1},
}
OVER_COMPILED_FORWARD = {
    "positions of one's own": {"position_ids": torch.arange(2, 20, 2)[None].expand(3, -1)},
    "beam search": {"num_beams": 3},
    "beam sampling": {"num_beams": 2, "do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "use_cache=False": {"use_cache": False},
}
ON_ORIGINAL_FORWARD = {
    "output_hidden_states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "output_attentions": {"return_dict_in_generate": True, "output_attentions": True},
}


def compared(result: Any) -> Any:
    """What two results must have in common; caches are of different kinds."""
    if isinstance(result, Tensor):
        return result
    return {name: value for name, value in result.items() if name != "past_key_values"}


def assert_slow(model: PreTrainedModel, path: str, caplog: pytest.LogCaptureFixture) -> None:
    """The last two calls took `path` for one reason, and it was said once."""
    stats = model.compiled.stats()
    assert stats.generate_calls == {path: 2}
    (reason,) = model.compiled.counters.slow_generates
    assert stats.slow_paths == {reason.id: 2}
    records = [record for record in caplog.records if record.name.startswith("compiled_llm")]
    assert [record.levelname for record in records] == ["WARNING"]
    said = records[0].getMessage()
    assert said.startswith("compiled_llm: generate takes a slower path")
    assert f"because {reason}. {reason.advice}" in said


def run_twice_and_compare(models: tuple[PreTrainedModel, PreTrainedModel], options: dict[str, Any], seed: int) -> None:
    plain, wrapped = models
    torch.manual_seed(seed)
    expected = plain.generate(**options)
    for _ in range(2):
        torch.manual_seed(seed)
        actual = wrapped.generate(**options)
        assert type(actual) is type(expected)
        torch.testing.assert_close(compared(actual), compared(expected), rtol=1e-3, atol=1e-3)
        del actual
    gc.collect()
    if wrapped.compiled.stats().pages is not None:
        assert_account_is_empty(wrapped)


@pytest.mark.parametrize("name", OVER_COMPILED_FORWARD)
def test_huggingfaces_loop_over_the_compiled_forward(name, inputs, seed, caplog):
    models = pair()
    if name == "prompt lookup":
        inputs = {key: value[:1, -4:] for key, value in inputs.items()}
    run_twice_and_compare(models, {**inputs, "max_new_tokens": 25, **OVER_COMPILED_FORWARD[name]}, seed)
    assert_slow(models[1], "compiled forward", caplog)


@pytest.mark.parametrize("name", WITH_PROCESSORS)
def test_processors_and_scores_run_between_steps(name, inputs, seed, caplog):
    models = pair()
    run_twice_and_compare(models, {**inputs, "max_new_tokens": 25, **WITH_PROCESSORS[name]}, seed)
    assert_slow(models[1], "processed loop", caplog)


@pytest.mark.parametrize("name", ON_ORIGINAL_FORWARD)
def test_huggingfaces_loop_over_the_original_forward(name, inputs, seed, caplog):
    overrides = {"attn_implementation": "eager"} if name == "output_attentions" else {}
    models = pair(**overrides)
    run_twice_and_compare(models, {**inputs, "max_new_tokens": 12, **ON_ORIGINAL_FORWARD[name]}, seed)
    assert_slow(models[1], "original", caplog)


def test_assisted_decoding_with_a_wrapped_model_on_either_side(seed):
    plain, wrapped = pair(eos_token_id=None)
    assistant = tiny_qwen3(seed=1, eos_token_id=None)
    ids = mixed_prompts([6], 128, seed)["input_ids"]
    expected = plain.generate(ids, max_new_tokens=15, do_sample=False)
    both = compiled_llm.wrap(copy.deepcopy(assistant), **OPTIONS)
    for main, helper in ((wrapped, assistant), (plain, both), (wrapped, both)):
        actual = main.generate(ids, max_new_tokens=15, do_sample=False, assistant_model=helper)
        torch.testing.assert_close(actual, expected)
    assert wrapped.compiled.stats().generate_calls == {"compiled forward": 2}
    assert set(both.compiled.stats().generate_calls) == {"fast loop"}
    gc.collect()
    for model in (wrapped, both):
        assert_account_is_empty(model)


def test_right_padding_without_a_cache_gives_huggingfaces_tokens(models, inputs, seed, caplog):
    """Each step then computes the prompt again, and its logits may be those of a masked token."""
    flipped = {name: value.flip(1) for name, value in inputs.items()}
    options = {"max_new_tokens": 6, "do_sample": False, "use_cache": False}
    run_twice_and_compare(models, {**flipped, **options}, seed)
    assert_slow(models[1], "original", caplog)


def test_position_ids_of_the_users_own(models, inputs, seed, caplog):
    positions = torch.arange(9).expand(3, 9) + torch.tensor([[0], [3], [40]])
    run_twice_and_compare(models, {**inputs, "position_ids": positions, "max_new_tokens": 10, "do_sample": False}, seed)
    assert_slow(models[1], "compiled forward", caplog)


def test_inputs_embeds_give_huggingfaces_tokens(models, inputs, seed, caplog):
    embeds = models[0].get_input_embeddings()(inputs["input_ids"]).detach()
    options = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"], "max_new_tokens": 8}
    run_twice_and_compare(models, {**options, "do_sample": False}, seed)
    assert_slow(models[1], "compiled forward", caplog)


def test_a_mask_with_four_dimensions_gives_huggingfaces_tokens(models, seed):
    plain, wrapped = models
    ids = mixed_prompts([6], 128, seed)["input_ids"]
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        torch.testing.assert_close(
            wrapped(input_ids=ids, attention_mask=mask).logits, plain(input_ids=ids, attention_mask=mask).logits
        )


def test_autocast_of_the_caller_gives_huggingfaces_tokens(models, inputs, seed, caplog):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run_twice_and_compare(models, {**inputs, "max_new_tokens": 8, "do_sample": False}, seed)
    assert_slow(models[1], "original", caplog)


def test_forward_hooks_on_the_model_fire_once_a_step(models, inputs, seed, caplog):
    _, wrapped = models
    fired: list[int] = []
    for model in models:
        model.register_forward_hook(lambda *_: fired.append(1))
        model.register_forward_pre_hook(lambda *_: fired.append(2))
    run_twice_and_compare(models, {**inputs, "max_new_tokens": 6, "do_sample": False}, seed)
    assert fired == [2, 1] * 6 * 3
    assert_slow(wrapped, "compiled forward", caplog)


def test_forward_hooks_that_change_logits_change_tokens(models, inputs):
    plain, wrapped = models

    def ban_odd_tokens(module: Any, args: Any, output: Any) -> Any:
        output.logits[..., 1::2] = -1e9
        return output

    handles = [model.register_forward_hook(ban_odd_tokens) for model in models]
    results = [greedy(model, inputs, 9) for model in models]
    torch.testing.assert_close(results[1], results[0])
    assert not (results[0][:, 9:] % 2).any()
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(greedy(wrapped, inputs, 9), greedy(plain, inputs, 9))


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_hooks_on_inner_modules_fire_whenever_they_are_registered(mode, inputs):
    model, plain = (tiny_llama(eos_token_id=None, num_hidden_layers=1) for _ in range(2))
    compiled_llm.wrap(model, **{**OPTIONS, "mode": mode, "progress": False})
    before = greedy(model, inputs, 6)
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: -output)
    plain.model.layers[0].register_forward_hook(lambda module, args, output: -output)
    changed = greedy(plain, inputs, 6)
    assert not torch.equal(changed, before)
    torch.testing.assert_close(greedy(model, inputs, 6), changed)
    handle.remove()
    torch.testing.assert_close(greedy(model, inputs, 6), before)


class Prompts(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.put_in: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.put_in.append(value)

    def end(self) -> None: ...


def test_a_streamer_of_sampled_beams_gets_the_prompts_alone_as_huggingfaces_does(models, inputs, seed):
    streamer = Prompts()
    options = {**inputs, "max_new_tokens": 6, "num_beams": 2, "do_sample": True, "streamer": streamer}
    run_twice_and_compare(models, options, seed)
    assert len(streamer.put_in) == 3
    assert all(torch.equal(prompts, streamer.put_in[0]) for prompts in streamer.put_in)


@pytest.mark.core
def test_without_a_cache_prompts_padded_on_the_right_go_on_from_their_padding(models, inputs, seed, caplog):
    padded = {name: value.flip(1) for name, value in inputs.items()}
    run_twice_and_compare(models, {**padded, "max_new_tokens": 6, "do_sample": False, "use_cache": False}, seed)
    assert_slow(models[1], "original", caplog)
