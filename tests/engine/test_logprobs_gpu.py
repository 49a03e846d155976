"""Log-probabilities on a GPU: of captured steps, whose memory the next launch uses again, and without a wait."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams
from engine.test_engine_gpu import check_greedy, some_requests
from support.execution.twins import DEVICE, OPTIONS, in_float32, small_qwen3
from support.parity import assert_account_is_empty, greedy, mixed_prompts

pytestmark = pytest.mark.gpu

SLEEP = 2_000_000_000
"""Cycles: about a second."""


@pytest.fixture(scope="module", params=["auto", "flashinfer"])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    options = {**OPTIONS, "kv_memory": "2400 tokens", "prefill_tokens": 64, "backend": request.param}
    wrapped = compiled_llm.wrap(small_qwen3(request.config.getoption("seed")), **options)
    yield wrapped
    compiled_llm.unwrap(wrapped)
    gc.collect()


def tables(model: PreTrainedModel, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([text], device=DEVICE)).logits[0].float(), dim=-1)


def test_they_are_as_near_to_float32_as_huggingfaces(model: PreTrainedModel, seed: int) -> None:
    """Chunks of prompts run beside decode steps, in memory that both use."""
    prompts = [prompt for prompt, _ in some_requests(seed, 40)]
    params = SamplingParams(temperature=0.8, seed=seed, max_tokens=30, logprobs=5, prompt_logprobs=2)
    others = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True) if n % 5 == 4 else params for n in range(40)
    ]
    with Engine(model, max_rows=12) as engine:
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
    stats = model.compiled.stats()
    assert (stats.graph_breaks, stats.recompiles, stats.cudagraph_skips) == (0, 0, 0)
    assert_account_is_empty(model)


def test_steps_with_log_probabilities_return_while_the_device_sleeps(model: PreTrainedModel, seed: int) -> None:
    settings = [
        SamplingParams(temperature=0, max_tokens=120, logprobs=most, ignore_eos=True) for most in (None, 5, 20, None)
    ]
    prompts = [prompt for prompt, _ in some_requests(seed, 4)]
    with Engine(model, max_rows=4) as engine:
        engine.generate(prompts, settings)  # what these sizes need is captured
        handles = [engine.submit(*asked) for asked in zip(prompts, settings, strict=True)]
        while min(len(handle.requests[0].tokens) for handle in handles) < 8:
            time.sleep(0.001)
        with engine._engine_thread.paused(), model.compiled.loop_lock.taken():
            loop = engine._engine_thread.loop
            assert loop is not None
            torch.cuda.synchronize()
            asleep = torch.cuda.Event()
            torch.cuda.set_sync_debug_mode("error")
            try:
                torch.cuda._sleep(SLEEP)
                asleep.record()
                start = time.perf_counter()
                loop.step(unchanged=True)
                plan = loop.scheduler.plan()
                loop.model_runner.thread.call(loop._launch, plan, True)
                loop.scheduler.launched(plan)
                took, over = time.perf_counter() - start, asleep.query()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert not over, f"two launches took {took:.3f} s, when the device had woken up"
        answers = [handle.result(timeout=60).token_ids for handle in handles]
    check_greedy(seed, list(zip(zip(prompts, settings, strict=True), answers, strict=True)))


def test_scores_of_recorded_steps_are_their_own(model: PreTrainedModel, seed: int) -> None:
    """Each step's logits are overwritten by the next replay: the greatest is that of the token which was taken."""
    inputs = {name: value.to(DEVICE) for name, value in mixed_prompts([5, 40, 17], 2048, seed).items()}
    out = greedy(model, inputs, 40, output_scores=True, output_logits=True, return_dict_in_generate=True)
    assert model.compiled.stats().slow_paths.get("processors") is None
    chosen = out.sequences[:, 40:]
    assert len(out.scores) == len(out.logits) == chosen.shape[1]
    for step, (scores, logits) in enumerate(zip(out.scores, out.logits, strict=True)):
        assert torch.equal(scores.argmax(dim=1), chosen[:, step])
        assert torch.equal(scores, logits)
