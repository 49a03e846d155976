"""Whatever runs beside it, each request gets the tokens that HuggingFace's ``generate`` gives it alone."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine import model_check
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine, QueueFullError
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.model.version.module_tree import ModuleTree
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine import tiny_engines
from support.engine.tiny_engines import PATIENCE
from support.huggingface.families import FAMILIES, make
from support.in_threads import start
from support.parity import alone, assert_account_is_empty, greedy, mixed_prompts

ENDS = [2, 5, 31, 77, 90, 101]
GREEDY = {"temperature": 0.0}


def tiny(seed: int = 0) -> PreTrainedModel:
    """One of two layers, whose answers end."""
    return tiny_engines.tiny(seed, eos_token_id=ENDS, num_hidden_layers=2)


def wrapped(tokens: int = 4000, **options: Any) -> PreTrainedModel:
    return tiny_engines.wrapped(tokens, tiny(), **{"max_batch_size": 8, "page_size": 16, **options})


@pytest.fixture(scope="module")
def plain() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def model(reading: None) -> PreTrainedModel:
    return wrapped()


def some_prompts(count: int, seed: int, longest: int = 70) -> list[list[int]]:
    """Prompts of mixed lengths; half of them begin like another."""
    draw = random.Random(seed)
    stems = [[draw.randrange(3, 128) for _ in range(length)] for length in (16, 33, 48)]
    rests = [[draw.randrange(3, 128) for _ in range(draw.randint(1, longest))] for _ in range(count)]
    return [(draw.choice(stems) if draw.random() < 0.5 else []) + rest for rest in rests]


def test_tokens_equal_huggingface(plain, engine, seed):
    prompts = some_prompts(12, seed)
    expected = [alone(plain, prompt, 20) for prompt in prompts]
    for _ in range(2):  # the second time, prompts are in the prefix cache
        outputs = engine.generate(prompts, SamplingParams(**GREEDY, max_tokens=20))
        assert [output.token_ids for output in outputs] == expected
        assert {output.finish_reason for output in outputs} == {"stop", "length"}
    assert all(output.cached_tokens == (len(output.prompt_token_ids) - 1) // 16 * 16 for output in outputs)


@pytest.mark.whole
def test_capped_logits_and_windows_under_hits_and_preemption(monkeypatch, one_thread, seed):
    """A Gemma 2, whose every other layer sees eight tokens."""
    monkeypatch.setattr(Loop, "asynchronous", True)
    monkeypatch.setitem(POLICIES, "auto", Greedy)  # more begin than fit: requests are preempted
    capped: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    plain, model = (make("Gemma2", {**FAMILIES["Gemma2"], **capped}, seed) for _ in range(2))
    compiled_llm.wrap(model, mode="eager", kv_memory="150 tokens", page_size=4, max_batch_size=4, progress=False)
    prompts = [range(3, 40), range(3, 25), range(3, 40), range(50, 55), range(3, 33)]
    expected = [alone(plain, list(prompt), 30) for prompt in prompts]
    with Engine(model) as engine:
        for _ in range(2):
            outputs = engine.generate([list(prompt) for prompt in prompts], SamplingParams(**GREEDY, max_tokens=30))
            assert [output.token_ids for output in outputs] == expected
        stats = engine.stats()
        assert stats.preemptions > 0
        assert stats.cached_tokens > 60
    assert_account_is_empty(model)


def test_without_a_limit_an_answer_has_what_positions_and_pages_allow(seed):
    with Engine(wrapped(tokens=64)) as engine:
        (output,) = engine.generate([5, 6, 7], SamplingParams(**GREEDY, max_tokens=None, ignore_eos=True))
        assert len(output.token_ids) == 64 - 3 + 1


def test_one_of_several_answers_is_cancelled(engine, seed):
    handle = engine.submit([5, 6, 7], SamplingParams(n=2, seed=1, max_tokens=200, ignore_eos=True))
    handle.cancel(1)
    assert [answer.finish_reason for answer in handle.result(PATIENCE).outputs] == ["length", "cancelled"]


# ---- streams


def test_tokens_come_to_loops_and_tasks(engine, seed):
    first, second = some_prompts(2, seed)
    params = SamplingParams(**GREEDY, max_tokens=9, ignore_eos=True)
    expected = [output.token_ids for output in engine.generate([first, second], params)]
    handle = engine.submit(first, params)
    assert list(handle) == handle.result().token_ids == expected[0]

    async def read() -> list[list[int]]:
        other = engine.submit(second, params)
        tokens = [token async for token in engine.submit(first, params)]
        return [tokens, (await other).token_ids]

    assert asyncio.run(read()) == expected


def test_calls_of_generate_join_a_busy_engine(plain, model, engine, seed):
    """Rows that end early are padded as ever, and what the engine cannot give takes its own loop."""
    prompts = some_prompts(3, seed)
    inputs = mixed_prompts([4, 30, 17], 128, seed)
    expected = plain.generate(**inputs, max_new_tokens=30, do_sample=False)
    torch.manual_seed(seed)
    draws = model.generate(**inputs, max_new_tokens=12, do_sample=True)
    assert model.compiled.stats().generate_calls == {"fast loop": 1}, "the engine is idle"
    handles = [engine.submit(prompt, SamplingParams(max_tokens=900, ignore_eos=True)) for prompt in prompts]
    torch.testing.assert_close(model.generate(**inputs, max_new_tokens=30, do_sample=False), expected)
    torch.manual_seed(seed)
    torch.testing.assert_close(model.generate(**inputs, max_new_tokens=12, do_sample=True), draws)
    assert model.compiled.stats().generate_calls == {"fast loop": 1, "engine": 2}
    out = model.generate(**inputs, max_new_tokens=30, do_sample=False, return_dict_in_generate=True)
    torch.testing.assert_close(out.sequences, expected)
    assert model.compiled.stats().generate_calls["fast loop"] == 2
    with pytest.raises(ValueError, match="max_batch_size=8"):
        model.generate(torch.full((9, 4), 5), max_new_tokens=2)
    del out
    assert not any(handle.done for handle in handles)


def test_twenty_callers_become_one_batch(plain, model, engine, seed):
    prompts = some_prompts(20, seed)
    penalised = {"suppress_tokens": list(range(50)), "repetition_penalty": 1.3}
    options: list[dict[str, Any]] = [{}, {"min_new_tokens": 15}, penalised, {}] * 5
    asked = list(zip(prompts, options, strict=True))
    calls = [start(lambda prompt=prompt, own=own: alone(model, prompt, 20, **own)) for prompt, own in asked]
    assert [call.result(PATIENCE) for call in calls] == [alone(plain, prompt, 20, **own) for prompt, own in asked]
    assert model.compiled.stats().generate_calls["engine"] >= 10


# ---- what ends a request, and what is refused


def test_a_row_that_is_nan_ends_alone(plain, model, engine, monkeypatch, seed):
    good, bad = [7, 8, 9], [11, 12, 13]
    embedding = model.get_input_embeddings()
    with torch.no_grad():
        embedding.weight[13] = torch.nan
    outputs = engine.generate([good, bad], SamplingParams(temperature=0.5, seed=1, max_tokens=6))
    assert [output.finish_reason for output in outputs] == ["length", "error"]
    assert "NaN" in str(outputs[1].error)
    with pytest.raises(RuntimeError, match="NaN"):
        engine.submit(bad, SamplingParams(temperature=0.5)).result(PATIENCE)


def test_a_salt_keeps_texts_apart(engine, seed):
    prompt = list(range(3, 60))
    for salt, cached in (("a", 0), ("b", 0), ("a", 48)):
        handle = engine.submit(prompt, SamplingParams(**GREEDY, max_tokens=2), cache_salt=salt)
        assert handle.result(PATIENCE).cached_tokens == cached


def test_the_queue_is_bounded(model, seed):
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    with Engine(model, max_num_seqs=1, max_queue=2) as engine:
        handles = [engine.submit([5, 6], params) for _ in range(2)]
        with pytest.raises(QueueFullError, match="max_queue=2"):
            engine.generate([[5], [6], [7]])
    assert {handle.result().finish_reason for handle in handles} == {"cancelled"}
    assert_account_is_empty(model)


def test_a_call_and_a_request_walk_once_over_the_modules_for_hooks(
    engine: Engine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """First tokens wait for that walk, which takes a tenth of a millisecond."""
    walks: list[object] = []
    hooks = ModuleTree.hooks
    monkeypatch.setattr(ModuleTree, "hooks", lambda tree: walks.append(tree) or hooks(tree))
    # Or a loop that a busy machine lets begin later than that, or takes as long to answer, checks the model once more.
    monkeypatch.setattr(model_check, "_SECONDS", PATIENCE)
    inputs, prompt = mixed_prompts([5, 9], 128, seed), [3, 4, 5]
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    for _ in range(3):
        walks.clear()
        greedy(model, inputs, 1)
        assert len(walks) == 1
        walks.clear()
        engine.generate([prompt], params)
        assert len(walks) == 1
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="inner_hooks"):
        engine.generate([prompt], params)
    greedy(model, inputs, 1)
    assert model.compiled.stats().slow_paths["inner_hooks"] == 1
    handle.remove()
    assert engine.generate([prompt], params)[0].outputs[0].finish_reason == "length"
