"""The engine on a GPU: captured chunks and decode steps, too few pages, rows that come and go, log-probabilities."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.admission.greedy import Greedy
from compiled_llm.engine.admission.policies import POLICIES
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.judged_answers import judged
from support.engine.unread_launches import check_launched, launch_unread, paused_amid
from support.execution.drafters import let_sizes_turn
from support.execution.twins import BEYOND_NOISE, DEVICE, OPTIONS, SMALL, in_float32, rms, small_qwen3
from support.parity import assert_account_is_empty, greedy, mixed_prompts

pytestmark = pytest.mark.gpu

Asked = tuple[list[int], SamplingParams]


WAYS: dict[str, dict[str, Any]] = {
    "auto": {"backend": "auto"},
    "flashinfer": {"backend": "flashinfer"},
    "3 graphs": {"max_graphs": 3},
    "cascade": {"cascade": True},
}


@pytest.fixture(scope="module", params=WAYS)
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    options = {**OPTIONS, "kv_memory": "1200 tokens", "prefill_tokens": 64, **WAYS[request.param]}
    wrapped = compiled_llm.wrap(small_qwen3(request.config.getoption("seed")), **options)
    yield wrapped
    compiled_llm.unwrap(wrapped)
    gc.collect()


def some_requests(seed: int, count: int) -> list[Asked]:
    draw, vocabulary = random.Random(seed), SMALL["vocab_size"]
    stems = [[draw.randrange(vocabulary) for _ in range(length)] for length in (0, 0, 16, 96)]
    asked: list[Asked] = []
    for number in range(count):
        prompt = draw.choice(stems) + [draw.randrange(vocabulary) for _ in range(draw.randint(1, 150))]
        sampled = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": draw.choice([1.0, 1.2]), "seed": number}
        how = sampled if number % 3 == 0 else {"temperature": 0.0}
        asked.append((prompt, SamplingParams(max_tokens=draw.randint(1, 60), ignore_eos=True, **how)))
    return asked


def answers(engine: Engine, asked: list[Asked]) -> list[list[int]]:
    outputs = engine.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    assert {output.finish_reason for output in outputs} == {"length"}
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("mixed", [False, True], ids=["two launches", "mixed"])
def test_tokens_are_the_most_likely_ones_also_after_rows_lost_their_pages(
    model: PreTrainedModel, mixed: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By HuggingFace's logits in float32, given what was fed in; bfloat16 may take the second of two near ties."""
    monkeypatch.setitem(POLICIES, "auto", Greedy)
    asked = some_requests(seed, 60)
    with Engine(model, max_num_seqs=12, mixed=mixed) as engine:
        given = [answers(engine, asked) for _ in range(2)]
        assert bool(engine.stats().mixed_steps) == mixed
        assert engine.stats().preemptions > 0
        assert engine.stats().cached_tokens > 0
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (0, 0, 0)
    config = model.compiled.config
    assert config.cascade == "auto" or stats.cascade_steps > 0
    assert config.backend != "flashinfer" or stats.cascade_steps == 0
    check_greedy(seed, [answered for tokens in given for answered in zip(asked, tokens, strict=True)])
    assert_account_is_empty(model)


def check_greedy(seed: int, answered: list[tuple[Asked, list[int]]], **config: Any) -> None:
    plain = small_qwen3(seed, **config)
    exact = in_float32(plain)
    for (prompt, params), answer in answered:
        if params.temperature == 0 and answer:
            ids = torch.tensor([prompt + answer], device=DEVICE)
            with torch.no_grad():
                logits, rounded = (model(ids).logits[0, len(prompt) - 1 : -1].float() for model in (exact, plain))
            behind = logits.amax(dim=1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
            noise = rms(rounded - logits)
            missed = behind > BEYOND_NOISE * noise.clamp(min=noise.mean())
            assert not missed.any(), f"tokens {missed.nonzero()[:, 0].tolist()} of an answer to {len(prompt)} tokens"


@pytest.mark.parametrize("mixed", [False, True], ids=["two launches", "mixed"])
def test_two_thousand_steps_of_requests_that_come_and_go(
    model: PreTrainedModel, mixed: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above; some are cancelled, and what they have got by then is judged too."""
    monkeypatch.setitem(POLICIES, "auto", Greedy)
    draw, asked = random.Random(seed), iter(some_requests(seed + 2, 5000))
    handles: list[tuple[Asked, RequestHandle]] = []
    with Engine(model, max_num_seqs=12, mixed=mixed) as engine:
        while engine.stats().steps < 2000:
            running = [handle for _, handle in handles if not handle.done]
            if len(running) < draw.randint(1, 24):
                prompt, params = request = next(asked)
                handles.append((request, engine.submit(prompt, params, priority=draw.randrange(2))))
            elif draw.random() < 0.05:
                draw.choice(running).cancel()
            else:
                time.sleep(0.005 * draw.random())
        answered = [(request, handle.result().token_ids) for request, handle in handles]
        assert engine.stats().preemptions > 0
    stats, table = model.compiled.stats(), model.compiled.cuda_graphs
    print(table)
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips, table.failures) == (0, 0, 0, 0)
    if table.max_graphs is not None:
        assert table.ready <= table.max_graphs
        assert table.misses > 0
        assert table.evictions > 0
    check_greedy(seed, answered)
    assert_account_is_empty(model)


def test_nothing_waits_for_the_device_but_reading_tokens(model: PreTrainedModel, seed: int) -> None:
    """Sampled rows are admitted and released while steps run, and lose their pages."""
    asked = some_requests(seed + 1, 40)
    with Engine(model, max_num_seqs=12) as engine:
        answers(engine, asked)
        engine.reset_prefix_cache()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            answers(engine, asked)
        finally:
            torch.cuda.set_sync_debug_mode("default")


SLEEP = 2_000_000_000
"""Cycles: about a second."""


@pytest.fixture(scope="module", params=["auto", "flashinfer"])
def roomy(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    """With pages that no request has to give back."""
    options = {**OPTIONS, "kv_memory": "2400 tokens", "prefill_tokens": 64, "backend": request.param}
    wrapped = compiled_llm.wrap(small_qwen3(request.config.getoption("seed")), **options)
    yield wrapped
    compiled_llm.unwrap(wrapped)
    gc.collect()


def tables(model: PreTrainedModel, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([text], device=DEVICE)).logits[0].float(), dim=-1)


# ---- log-probabilities


def test_log_probabilities_are_as_near_to_float32_as_huggingfaces(roomy: PreTrainedModel, seed: int) -> None:
    """Chunks of prompts run beside decode steps, in memory that both use."""
    prompts = [prompt for prompt, _ in some_requests(seed, 40)]
    params = SamplingParams(temperature=0.8, seed=seed, max_tokens=30, logprobs=5, prompt_logprobs=2)
    others = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True) if n % 5 == 4 else params for n in range(40)
    ]
    with Engine(roomy, max_num_seqs=12) as engine:
        outputs = engine.generate(prompts, others)
    exact, theirs = in_float32(small_qwen3(seed)), small_qwen3(seed)
    differences: list[torch.Tensor] = []
    noise: list[torch.Tensor] = []
    for output in outputs:
        answer = output.outputs[0]
        if answer.logprobs is None or output.prompt_logprobs is None:
            continue
        text = output.prompt_token_ids + answer.token_ids
        found = [*output.prompt_logprobs[1:], *answer.logprobs]
        ours = torch.tensor([entries[token].logprob for token, entries in zip(text[1:], found, strict=True) if entries])
        both = [
            tables(reference, text)[:-1].gather(1, torch.tensor(text[1:], device=DEVICE)[:, None])[:, 0].cpu()
            for reference in (exact, theirs)
        ]
        differences.append(ours - both[0])
        noise.append(both[1] - both[0])
        for entries in answer.logprobs:
            values = sorted((logprob for logprob, _ in entries.values()), reverse=True)
            assert all(rank <= 1 + values.index(logprob) or rank > 5 for logprob, rank in entries.values())
    off, theirs_off = (float(torch.cat(each).square().mean().sqrt()) for each in (differences, noise))
    print(f"RMS of log-probabilities: ours {off:.4f}, HuggingFace's in bfloat16 {theirs_off:.4f}")
    assert off <= 1.1 * theirs_off
    stats = roomy.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (0, 0, 0)
    assert_account_is_empty(roomy)


def test_steps_with_log_probabilities_return_while_the_device_sleeps(roomy: PreTrainedModel, seed: int) -> None:
    settings = [
        SamplingParams(temperature=0, max_tokens=120, logprobs=most, ignore_eos=True) for most in (None, 5, 20, None)
    ]
    prompts = [prompt for prompt, _ in some_requests(seed, 4)]
    with Engine(roomy, max_num_seqs=4) as engine:
        engine.generate(prompts, settings)  # what these sizes need is captured
        handles = [engine.submit(*asked) for asked in zip(prompts, settings, strict=True)]
        while min(len(handle.requests[0].tokens) for handle in handles) < 8:
            time.sleep(0.001)
        with engine._engine_thread.paused(), roomy.compiled.loop_lock.taken():
            loop = engine._engine_thread.loop
            assert loop is not None
            torch.cuda.synchronize()
            asleep = torch.cuda.Event()
            torch.cuda.set_sync_debug_mode("error")
            try:
                torch.cuda._sleep(SLEEP)
                asleep.record()
                start = time.perf_counter()
                loop.step()
                plan = loop.scheduler.plan()
                loop.model_runner.thread.call(loop._launch, plan)
                loop.scheduler.launched(plan)
                took, over = time.perf_counter() - start, asleep.query()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert not over, f"two launches took {took:.3f} s, when the device had woken up"
        answers = [handle.result(timeout=60).token_ids for handle in handles]
    check_greedy(seed, list(zip(zip(prompts, settings, strict=True), answers, strict=True)))


@pytest.mark.parametrize("roomy", ["auto"], indirect=True)  # FlashInfer plans from exact lengths
def test_steps_that_guess_return_while_the_device_sleeps(
    roomy: PreTrainedModel, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks that are repeated, other sizes, a row that goes, one that is admitted, and pages that rows enter."""
    let_sizes_turn(monkeypatch)
    config = {"method": "ngram", "num_speculative_tokens": 7}
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    prompts = [[50 + number, *range(3, 15)] * 3 for number in range(4)]
    with Engine(roomy, max_num_seqs=3, speculative_config=config, prefix_cache=False) as engine:
        asked = [(prompt, params) for prompt in prompts]
        for rows in (2, 3):  # what these sizes need is captured
            engine.generate(prompts[:rows], params)
        for number in range(2):  # and of a row that goes, and of a prompt beside others, in the first of these
            with paused_amid(engine, asked, 3, 40) as (loop, handles), roomy.compiled.loop_lock.taken():
                torch.cuda.synchronize()
                asleep = torch.cuda.Event()
                torch.cuda.set_sync_debug_mode("error" if number else "default")
                try:
                    torch.cuda._sleep(SLEEP)
                    asleep.record()
                    start = time.perf_counter()
                    launched = launch_unread(loop, handles[1].requests[0], catch_up=number == 0)
                    took, over = time.perf_counter() - start, asleep.query()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                check_launched(launched, 3)
                assert number == 0 or not over, f"nine launches took {took:.3f} s, when the device had woken up"
            for index in (0, 2, 3):
                assert len(handles[index].result(timeout=60).token_ids) == params.max_tokens
    assert roomy.compiled.stats().recompiles == 0
    assert_account_is_empty(roomy)


@pytest.mark.parametrize("roomy", ["auto"], indirect=True)  # FlashInfer plans from exact lengths
def test_two_thousand_steps_that_guess_miss_no_more_of_float32s_best_tokens_than_others(
    roomy: PreTrainedModel, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size of steps in turn, and texts that repeat themselves, so that guesses are found."""
    exact, draw = in_float32(small_qwen3(seed)), random.Random(seed)
    stems = [[draw.randrange(SMALL["vocab_size"]) for _ in range(5 + number)] for number in range(8)]
    prompts, new, steps = [stem * 3 for stem in stems], 200, 2000
    without = judged(roomy, exact, prompts, new, steps)
    let_sizes_turn(monkeypatch)
    config = {"method": "ngram", "num_speculative_tokens": 7}
    guessing = judged(roomy, exact, prompts, new, steps, speculative_config=config)
    print(f"without guesses {without}, with {guessing}")
    assert not guessing.is_worse_than(without)
    stats = roomy.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (0, 0, 0)
    assert_account_is_empty(roomy)


def test_scores_of_recorded_steps_are_their_own(roomy: PreTrainedModel, seed: int) -> None:
    """Each step's logits are overwritten by the next replay: the greatest is that of the token which was taken."""
    inputs = {name: value.to(DEVICE) for name, value in mixed_prompts([5, 40, 17], 2048, seed).items()}
    out = greedy(roomy, inputs, 40, output_scores=True, output_logits=True, return_dict_in_generate=True)
    assert roomy.compiled.stats().slow_paths.get("processors") is None
    chosen = out.sequences[:, 40:]
    assert len(out.scores) == len(out.logits) == chosen.shape[1]
    for step, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
        assert torch.equal(scores.argmax(dim=1), chosen[:, step])
        assert torch.equal(scores, logits)
