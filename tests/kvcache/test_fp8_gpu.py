"""Pages of fp8 on a GPU: an engine's tokens, judged by a model in float32 that rounds its keys and values alike."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm import Engine, KVScales, SamplingParams, kv_scales
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from support.execution.twins import BEYOND_NOISE, DEVICE, OPTIONS, SMALL, in_float32, rms, small_qwen3
from support.fp8_oracle import fp8_oracle
from support.parity import assert_account_is_empty

pytestmark = pytest.mark.gpu

WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "flashinfer": {"backend": "flashinfer"},
    "cascade": {"cascade": True},
    "piecewise": {"mode": "piecewise"},
    "compile": {"mode": "compile"},
    "reference": {"backend": "reference", "mode": "eager"},
}


def some_prompts(seed: int, count: int) -> list[list[int]]:
    draw, vocabulary = random.Random(seed), SMALL["vocab_size"]
    stems = [[draw.randrange(vocabulary) for _ in range(length)] for length in (0, 16, 96)]
    return [draw.choice(stems) + [draw.randrange(vocabulary) for _ in range(draw.randint(1, 80))] for _ in range(count)]


def check_greedy(seed: int, scales: KVScales, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    """Given what was fed in, each token is the most likely one but for bfloat16's noise, rounding to fp8 included."""
    rounded = fp8_oracle(small_qwen3(seed), scales)
    exact = fp8_oracle(in_float32(small_qwen3(seed)), scales)
    for prompt, answer in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + answer], device=DEVICE)
        with torch.no_grad():
            logits, own = (model(ids).logits[0, len(prompt) - 1 : -1].float() for model in (exact, rounded))
        behind = logits.amax(dim=1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        noise = rms(own - logits)
        missed = behind > BEYOND_NOISE * noise.clamp(min=noise.mean())
        assert not missed.any(), f"tokens {missed.nonzero()[:, 0].tolist()} of an answer to {len(prompt)} tokens"


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    return [output.token_ids for output in engine.generate(prompts, params)]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_rounded_keys_and_values(way: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the prefix cache, after rows lost their pages, with new scales, and after sleep."""
    monkeypatch.setitem(POLICIES, "auto", Greedy)
    prompts = some_prompts(seed, 16)
    plain: PreTrainedModel = small_qwen3(seed)
    first = kv_scales(plain, prompts)
    uneven = [[scale * (0.3 + 0.1 * head) for head, scale in enumerate(heads)] for heads in first.keys]
    second = KVScales(uneven, first.values)
    options = {**OPTIONS, "kv_memory": "900 tokens", "prefill_tokens": 64, **WAYS[way]}
    model = compiled_llm.wrap(plain, kv_dtype="fp8_e4m3", kv_scales=first, **options)
    with Engine(model, max_num_seqs=12) as engine:
        for _ in range(2):
            check_greedy(seed, first, prompts, answers(engine, prompts))
        graphs = engine.stats().cuda_graphs
        model.compiled.set_kv_scales(second)
        check_greedy(seed, second, prompts, answers(engine, prompts))
        assert engine.stats().cuda_graphs >= graphs
        assert model.compiled.recaptures()[0] == 0
        engine.sleep()
        engine.wake()
        check_greedy(seed, second, prompts, answers(engine, prompts))
        assert engine.stats().preemptions > 0
        assert engine.stats().cached_tokens > 0
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (0, 0, 0)
    assert (stats.cascade_steps > 0) == (way == "cascade")
    assert stats.kv_saturated > 0, "of keys whose scales were too small"
    assert_account_is_empty(model)
    compiled_llm.unwrap(model)


def test_pages_take_half_the_memory(seed: int) -> None:
    taken = []
    for kv_dtype in (None, "fp8_e4m3"):
        model = compiled_llm.wrap(small_qwen3(seed), kv_dtype=kv_dtype, **{**OPTIONS, "kv_memory": "3200 tokens"})
        model.compiled.warmup([1])
        taken.append(model.compiled.stats().memory["pages"])
        compiled_llm.unwrap(model)
    assert taken[0] == 2 * taken[1]


def test_steps_are_not_waited_for_to_count_clamped_numbers(seed: int) -> None:
    """Counts are read when they are asked for, from any thread, while graphs are captured and replayed."""
    scales = KVScales(*([[1e-4] * SMALL["num_key_value_heads"]] * SMALL["num_hidden_layers"] for _ in range(2)))
    model = compiled_llm.wrap(small_qwen3(seed), kv_dtype="fp8_e4m3", kv_scales=scales, **OPTIONS)
    counts: list[int] = []
    with Engine(model, max_num_seqs=8) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        handles = [engine.submit(prompt, params) for prompt in some_prompts(seed, 8)]
        counts += [model.compiled.stats().kv_saturated for _ in handles[0]]
        for handle in handles:
            handle.result()
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] <= model.compiled.stats().kv_saturated
    assert model.compiled.stats().cudagraph_skips == 0
    compiled_llm.unwrap(model)
