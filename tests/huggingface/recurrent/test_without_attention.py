"""Models whose layers are all recurrent: pages only count their tokens, and caches are called ``cache_params``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compiled_llm
from compiled_llm import Engine, SamplingParams, UnsupportedModelError
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from support.huggingface.recurrent_families import ALL_RECURRENT, recurrent_model
from support.huggingface.recurrent_pairs import (
    LENGTHS,
    PAD,
    left_padded,
    new_tokens_of,
    of_rows_alone,
    plain_family,
    poison_released_states,
    prompts_of,
    wrapped_family,
)
from support.parity import assert_account_is_empty

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]

FAMILIES = sorted(ALL_RECURRENT)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=[pytest.mark.slow, pytest.mark.whole])])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_rows_alone(family: str, mode: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = wrapped_family(family, mode), prompts_of(LENGTHS, seed)
    poison_released_states(model, monkeypatch)
    expected = of_rows_alone(family, prompts, 12)
    for _ in range(2):
        assert new_tokens_of(model, prompts, 12, eos_token_id=None) == expected
    stats = model.compiled.stats()
    assert set(stats.generate_calls) == {"fast loop"}
    assert stats.memory["pages"] == 0 < stats.memory["states"]
    assert stats.recompiles == 0
    assert_account_is_empty(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_goes_on_under_the_name_that_the_model_has_for_it(family: str, seed: int) -> None:
    model = wrapped_family(family)
    first, more = prompts_of([9, 5], seed)
    inputs = left_padded([first])
    out = model.generate(
        **inputs, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=PAD, return_dict_in_generate=True
    )
    text = [*out.sequences[0].tolist(), *more]
    (expected,) = of_rows_alone(family, [text], 8)
    branch = copy.deepcopy(out.past_key_values)
    for cache in (out.past_key_values, branch):
        assert new_tokens_of(model, [text], 8, eos_token_id=None, cache_params=cache) == [expected]
        cache.close()
    assert_account_is_empty(model)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_forward_and_beams_go_over_states(family: str, seed: int) -> None:
    model, plain = wrapped_family(family), plain_family(family)
    inputs = left_padded(prompts_of([21], seed))
    ids: Tensor = inputs["input_ids"]
    expected = plain(input_ids=ids).logits
    whole = model(input_ids=ids)
    torch.testing.assert_close(whole.logits, expected, rtol=1e-4, atol=1e-4)
    begun = model(input_ids=ids[:, :13])
    rest = model(input_ids=ids[:, 13:], cache_params=begun.cache_params)
    torch.testing.assert_close(rest.logits, expected[:, 13:], rtol=1e-4, atol=1e-4)
    del whole, begun, rest
    beams: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(**inputs, **beams), plain.generate(**inputs, **beams))
    stats = model.compiled.stats()
    assert set(stats.generate_calls) == {"compiled forward"}
    assert set(stats.forward_calls) == {"compiled"}
    assert_account_is_empty(model)


def test_the_engine_serves_them_with_few_pages(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "auto", Greedy)  # more begin than fit: requests are preempted
    model = wrapped_family("Mamba2", kv_memory="96 tokens")
    prompts = prompts_of([5, 23, 9, 30], seed)
    with Engine(model) as engine:
        outputs = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        assert engine.stats().preemptions > 0
    assert [list(own.outputs[0].token_ids) for own in outputs] == of_rows_alone("Mamba2", prompts, 20)
    assert_account_is_empty(model)


@pytest.mark.parametrize("kv_memory", [None, 0.25, 2**20, "1MiB", "400 tokens"])
def test_pages_that_take_nothing_are_as_many_as_rows_can_use(kv_memory: Any, seed: int) -> None:
    model = wrapped_family("Mamba", kv_memory=kv_memory, max_batch_size=2)
    model.compiled.warmup([1])
    assert model.compiled.stats().pages.total == (100 if kv_memory == "400 tokens" else 2 * 256 // 4)


class Other(nn.Module):
    """Attention, for all that anybody knows."""

    def forward(self, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return states.cumsum(1)


def test_a_layer_that_keeps_no_state_may_attend_in_a_way_of_its_own() -> None:
    model = recurrent_model("Mamba")
    model.backbone.layers[1].mixer = Other()
    with pytest.raises(UnsupportedModelError, match="3 layers, of which none reach the attention interface"):
        compiled_llm.wrap(model, mode="eager")
