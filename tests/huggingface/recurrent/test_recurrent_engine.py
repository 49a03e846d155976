"""Engines over models with recurrent layers: each request gets what HuggingFace gives it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.random_requests import CAPTURES
from support.engine.tiny_engines import PATIENCE, greedy
from support.huggingface.recurrent_families import recurrent_model
from support.huggingface.recurrent_pairs import (
    FEW,
    new_tokens_of,
    of_rows_alone,
    plain_family,
    poison_released_states,
    prompts_of,
    wrapped_family,
)
from support.parity import assert_account_is_empty

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("one_thread")]


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_samples_of_a_prompt_have_states_of_their_own(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (prompt,) = wrapped_family("Qwen3_5"), prompts_of([21], seed)
    poison_released_states(model, monkeypatch)
    params = SamplingParams(temperature=1.0, max_tokens=12, n=3, seed=seed, logprobs=1, ignore_eos=True)
    with Engine(model, max_num_seqs=8) as engine:
        (output,) = engine.generate([prompt], params)
        (first,) = engine.generate([prompt], greedy(12, n=2))
    assert [list(own.token_ids) for own in first.outputs] == of_rows_alone("Qwen3_5", [prompt], 12) * 2
    assert len({tuple(own.token_ids) for own in output.outputs}) == 3
    for own in output.outputs:
        ids = list(own.token_ids)
        with torch.no_grad():
            logits = plain_family("Qwen3_5")(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)[range(len(ids)), ids]
        assert own.logprobs is not None
        found = [place[token].logprob for place, token in zip(own.logprobs, ids, strict=True)]
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-3, atol=1e-3)
    assert_account_is_empty(model)


def test_an_engine_sleeps_and_gets_new_weights(seed: int, tmp_path: Path) -> None:
    model, prompts = wrapped_family("Qwen3_5"), prompts_of([5, 33], seed)
    recurrent_model("Qwen3_5", 1).save_pretrained(tmp_path)
    with Engine(model, max_num_seqs=4) as engine:
        for _ in range(2):
            assert tokens_of(engine.generate(prompts, greedy(9))) == of_rows_alone("Qwen3_5", prompts, 9)
            engine.sleep()
            engine.wake()
        engine.update_weights(tmp_path)
        found = tokens_of(engine.generate(prompts, greedy(9)))
    other = recurrent_model("Qwen3_5", 1)
    assert found == [new_tokens_of(other, [own], 9, eos_token_id=None)[0] for own in prompts]
    assert_account_is_empty(model)


SLEEPS = ["eager", *(pytest.param(mode, marks=[pytest.mark.slow, pytest.mark.whole]) for mode in CAPTURES)]


@pytest.mark.whole
@pytest.mark.parametrize("family", ["Qwen3_5", pytest.param("Jamba", marks=pytest.mark.whole)])
@pytest.mark.parametrize("mode", SLEEPS)
def test_requests_go_on_after_sleep(family: str, mode: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """States go with the pages: those of requests that run are computed again, and the prefix cache has none."""
    CAPTURES.get(mode, lambda patch: None)(monkeypatch)
    model, prompts = wrapped_family(family, mode), prompts_of([5, 33, 40], seed)
    expected = of_rows_alone(family, prompts, 60)
    with Engine(model, max_num_seqs=4) as engine:
        assert tokens_of(engine.generate(prompts, greedy(30))) == [own[:30] for own in expected]
        held = model.compiled.new_cache()
        with torch.no_grad():
            model(torch.tensor([prompts[0]]), past_key_values=held)
        before = engine.stats().states
        assert before is not None
        assert before.cached > 0
        with pytest.raises(RuntimeError, match="caches hold 2 pages"):
            engine.sleep()
        held.close()
        handles = [engine.submit(prompt, greedy(60)) for prompt in prompts]
        for handle in handles:
            next(iter(handle))
        engine.sleep(requests="park", weights=False)
        assert engine.stats().states is None
        assert new_tokens_of(model, prompts[:1], 6, eos_token_id=None) == [expected[0][:6]]
        assert dict(model.compiled.stats().slow_paths) == {"asleep": 1}
        with pytest.raises(ValueError, match="the model is asleep, and has no pages"):
            model(torch.tensor([[5]]), past_key_values=held)
        engine.wake()
        with torch.no_grad():
            model(torch.tensor([[5]]), past_key_values=held)  # closed, it may begin again
        held.close()
        assert tokens_of(handle.result(PATIENCE) for handle in handles) == expected
        after = engine.stats().states
        assert after is not None
        assert (after.total, after.used) == (before.total, 2)
    assert_account_is_empty(model)
    if mode != "eager":
        assert (model.compiled.stats().graph_breaks, model.compiled.stats().recompiles) == (0, 0)


# ---- options of wrap


def test_scales_are_measured_of_layers_that_attend(seed: int) -> None:
    prompts = prompts_of([5, 17, 33], seed)
    scales = compiled_llm.kv_scales(plain_family("Qwen3_5"), prompts)
    assert scales.kv_heads == ([0, 2, 0], [0, 2, 0])
    model = wrapped_family("Qwen3_5", kv_dtype="fp8_e4m3", kv_scales=scales)
    assert new_tokens_of(model, prompts, 2, eos_token_id=None) == of_rows_alone("Qwen3_5", prompts, 2)
    assert model.compiled.stats().kv_saturated == 0


@pytest.mark.slow
@pytest.mark.whole
def test_explain_sees_the_programs_of_a_wrapped_model() -> None:
    model = recurrent_model("Lfm2")
    classes = [type(module) for module in model.modules()]
    before = str(compiled_llm.explain(model))
    assert [type(module) for module in model.modules()] == classes
    after = str(compiled_llm.explain(compiled_llm.wrap(model, mode="eager", progress=False, **FEW)))
    shown, again = ([line for line in text.splitlines() if " yes " in line] for text in (before, after))
    assert len(shown) == 3
    assert shown == again
    assert "Every program is one graph" in before


@pytest.mark.parametrize("first", ["adapter", "wrap"])
def test_adapters_of_recurrent_layers(first: str, seed: int) -> None:
    prompts = prompts_of([5, 18], seed)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    models: list[Any] = []
    for wraps in (False, True):
        model = recurrent_model("Qwen3_5")
        if wraps and first == "wrap":
            compiled_llm.wrap(model, mode="eager", progress=False, **FEW)
        torch.manual_seed(seed)
        models.append(get_peft_model(model, lora).eval())
        if wraps and first == "adapter":
            compiled_llm.wrap(model, mode="eager", progress=False, **FEW)
    expected = [new_tokens_of(models[0], [own], 6, eos_token_id=None)[0] for own in prompts]
    assert expected != of_rows_alone("Qwen3_5", prompts, 6)
    assert new_tokens_of(models[1], prompts, 6, eos_token_id=None) == expected
