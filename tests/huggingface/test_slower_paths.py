"""What the fast loop cannot do gives HuggingFace's result all the same; `test_paths.py` has each reason."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from support.huggingface.callbacks import Collected
from support.huggingface.pairs import pair
from support.parity import assert_account_is_empty, greedy

pytestmark = pytest.mark.core


def compared(result: Any) -> Any:
    """What two results must have in common; caches are of different kinds."""
    if isinstance(result, Tensor):
        return result
    return {name: value for name, value in result.items() if name != "past_key_values"}


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


@pytest.mark.parametrize(
    ("path", "change", "options"),
    [
        ("processed loop", "left", {"output_scores": True, "watermarking_config": {"bias": 2.5}}),
        ("processed loop", "left", {"output_logits": True, "no_repeat_ngram_size": 1}),
        ("original", "right", {"use_cache": False}),
        ("compiled forward", "positions", {}),
    ],
    ids=["scores", "logits", "right padding without a cache", "positions of each row"],
)
def test_results_are_huggingfaces(path, change, options, inputs, seed):
    """Without a cache each step computes the prompt again, and its logits may be those of a masked token."""
    models = pair()
    given = {name: value.flip(1) for name, value in inputs.items()} if change == "right" else inputs
    if change == "positions":
        given["position_ids"] = torch.arange(9).expand(3, 9) + torch.tensor([[0], [3], [40]])
    options = {"return_dict_in_generate": True, "max_new_tokens": 12, "do_sample": False, **options}
    run_twice_and_compare(models, {**given, **options}, seed)
    assert models[1].compiled.stats().generate_calls == {path: 2}


def test_forward_hooks_on_the_model_fire_once_a_step(models, inputs, seed):
    fired: list[int] = []
    for model in models:
        model.register_forward_hook(lambda *_: fired.append(1))
        model.register_forward_pre_hook(lambda *_: fired.append(2))
    run_twice_and_compare(models, {**inputs, "max_new_tokens": 6, "do_sample": False}, seed)
    assert fired == [2, 1] * 6 * 3


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


def test_a_streamer_of_sampled_beams_gets_the_prompts_alone_as_huggingfaces_does(models, inputs, seed):
    streamer = Collected()
    options = {**inputs, "max_new_tokens": 6, "num_beams": 2, "do_sample": True, "streamer": streamer}
    run_twice_and_compare(models, options, seed)
    assert streamer.calls == [inputs["input_ids"].repeat_interleave(2, 0).tolist()] * 3
