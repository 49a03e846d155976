"""Processors that few calls have: HuggingFace's own run between two forwards, in `generate` and in `generate_batch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TypicalLogitsWarper

import compiled_llm
from compiled_llm.compat.continuous_batching import processors_of
from support.parity import assert_account_is_empty, mixed_prompts
from support.tiny_models import tiny_qwen3

pytestmark = pytest.mark.core

ENDS = [2, 5, 31, 77]
PROMPTS = [[5, 6, 7], [9, 10, 11, 12], [20] * 30]
PENALTIES: dict[str, dict[str, Any]] = {
    "of the prompt": {"encoder_repetition_penalty": 1.6},
    "of the length": {"exponential_decay_length_penalty": (3, 1.4)},
    "both, with others": {
        "encoder_repetition_penalty": 0.7,
        "exponential_decay_length_penalty": (2, 1.3),
        "repetition_penalty": 1.2,
        "suppress_tokens": list(range(80, 128)),  # 5.17 makes NaN of what is barred before it grows
    },
}
FILTERS: dict[str, dict[str, Any]] = {
    "typical_p": {"typical_p": 0.3},
    "top_h": {"top_h": 0.4},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.1},
    "all, with others": {
        "top_h": 0.9,
        "typical_p": 0.95,
        "epsilon_cutoff": 0.001,
        "eta_cutoff": 0.002,
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.95,
        "suppress_tokens": [7, 8, 9],
    },
}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny_qwen3(eos_token_id=ENDS)


@pytest.fixture
def wrapped() -> Iterator[Any]:
    options: dict[str, Any] = {"mode": "eager", "page_size": 4, "kv_memory": "4000 tokens", "progress": False}
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=ENDS), max_batch_size=32, **options)
    yield model
    assert_account_is_empty(model)


def batched(model: Any, new: int = 9, own: Any = (), **options: Any) -> list[Any]:
    """What `generate_batch` answers to the prompts, with log-probabilities of what tokens are drawn from."""
    settings = GenerationConfig(**{"max_new_tokens": new, "do_sample": False, "eos_token_id": ENDS, **options})
    batching = ContinuousBatchingConfig(return_logprobs=True, seed=3, per_request_processors=bool(own))
    with model.continuous_batching_context_manager(settings, continuous_batching_config=batching) as manager:
        for prompt in PROMPTS:
            manager.add_request(prompt, **dict(own))
        outputs = []
        while sum(output.is_finished() for output in outputs) < len(PROMPTS) * (settings.num_return_sequences or 1):
            outputs.append(manager.get_result(timeout=60))
    assert not any(output.error for output in outputs)
    return outputs


def assert_scored(plain: Any, outputs: list[Any], processors: LogitsProcessorList) -> None:
    for output in outputs:
        text, start = torch.tensor([output.prompt_ids + output.generated_tokens]), len(output.prompt_ids)
        with torch.no_grad():
            logits = plain(text).logits[0, start - 1 : -1]
        expected = processors(text[:, :start].expand(len(logits), -1), logits).log_softmax(dim=-1)  # type: ignore[arg-type]
        assert output.logprobs == pytest.approx(expected.gather(1, text[0, start:, None])[:, 0].tolist(), abs=1e-4)


@pytest.mark.parametrize("name", PENALTIES)
def test_in_generate_batch_each_prompt_has_its_own_penalties(name: str, plain: Any, wrapped: Any) -> None:
    outputs = {tuple(output.prompt_ids): output for output in batched(wrapped, **PENALTIES[name])}
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        expected = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False, output_scores=True,
            return_dict_in_generate=True, **PENALTIES[name],
        )  # fmt: skip
        tokens, output = expected.sequences[0, len(prompt) :], outputs[tuple(prompt)]
        assert output.generated_tokens == tokens.tolist()
        scores = torch.cat(expected.scores).log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
        assert output.logprobs == pytest.approx(scores.tolist(), abs=1e-4)
    stats = wrapped.compiled.stats()
    assert (stats.generate_calls, stats.slow_paths) == ({"engine": 1}, {"processors": len(PROMPTS)})


@pytest.mark.parametrize("name", FILTERS)
def test_filters_leave_the_tokens_that_huggingfaces_leave(name: str, plain: Any, wrapped: Any, seed: int) -> None:
    options, inputs = SAMPLED | FILTERS[name], mixed_prompts([2, 9] * 4, 128, seed)
    torch.manual_seed(seed)
    found = wrapped.generate(
        **inputs, max_new_tokens=12, eos_token_id=ENDS, pad_token_id=0, output_scores=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    ids, mask = found.sequences, inputs["attention_mask"]
    mask = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
    with torch.no_grad():
        logits = plain(ids, attention_mask=mask, position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0)).logits
    processors = processors_of(plain, GenerationConfig(**options), [5], 12, ENDS)
    width, drawn = inputs["input_ids"].shape[1], _before_its_end(ids[:, inputs["input_ids"].shape[1] :])
    for step, scores in enumerate(found.scores):
        expected = processors(ids[:, : width + step], logits[:, width + step - 1].float())
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
        chosen = expected.gather(1, ids[:, width + step, None])[:, 0]
        assert bool((chosen[drawn[:, step]] > -torch.inf).all()), "a token was drawn that the filters had left out"
    assert wrapped.compiled.stats().slow_paths == {"processors": 1}


def _before_its_end(tokens: Tensor) -> Tensor:
    """Whether each token was drawn, and is none of the pads after a row's end."""
    ends = torch.isin(tokens, torch.tensor(ENDS)).long()
    return ends.cumsum(dim=1) - ends == 0


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("name", FILTERS)
def test_in_generate_batch_tokens_are_drawn_from_what_filters_leave(name: str, plain: Any, wrapped: Any) -> None:
    options = SAMPLED | FILTERS[name]
    outputs = batched(wrapped, num_return_sequences=8, **options)
    processors = processors_of(plain, GenerationConfig(**options), [5], 9, ENDS)
    assert_scored(plain, outputs, processors)
    assert len({tuple(output.generated_tokens) for output in outputs}) > len(PROMPTS)
    assert wrapped.compiled.stats().generate_calls == {"engine": 1}


@pytest.mark.parametrize("loop", ["generate", "generate_batch"])
def test_draws_follow_the_distribution(loop: str, plain: Any, wrapped: Any, seed: int) -> None:
    """Each token's share of 512 draws is its chance, but for what five deviations explain."""
    options: dict[str, Any] = SAMPLED | {"typical_p": 0.8, "temperature": 0.6, "max_new_tokens": 1}
    prompt, rows = torch.tensor([PROMPTS[0]]), 32
    with torch.no_grad():
        logits = plain(prompt).logits[:, -1].float()
    chances = processors_of(plain, GenerationConfig(**options), [5], 1, ENDS)(prompt, logits)[0].softmax(dim=-1)  # type: ignore[arg-type]
    torch.manual_seed(seed)
    drawn: list[int] = []
    if loop == "generate":
        for _ in range(512 // rows):
            drawn += wrapped.generate(prompt, num_return_sequences=rows, **options)[:, -1].tolist()
    else:
        settings = GenerationConfig(num_return_sequences=64, eos_token_id=-1, **options)
        outputs = wrapped.generate_batch([PROMPTS[0]] * 8, settings, ContinuousBatchingConfig(seed=seed))
        drawn = [token for output in outputs.values() for token in output.generated_tokens]
    shares = torch.bincount(torch.tensor(drawn), minlength=128) / len(drawn)
    assert bool((shares[chances == 0] == 0).all())
    assert bool(((shares - chances).abs() <= 5 * (chances * (1 - chances) / len(drawn)).sqrt()).all())


def test_a_requests_own_settings_count_among_the_others(plain: Any, wrapped: Any) -> None:
    config: dict[str, Any] = SAMPLED | {"typical_p": 0.9, "temperature": 0.5}
    outputs = batched(wrapped, own={"temperature": 1.7}, **config)
    assert_scored(plain, outputs, LogitsProcessorList([TemperatureLogitsWarper(1.7), TypicalLogitsWarper(0.9)]))


def test_a_request_without_them_waits_for_nothing(wrapped: Any) -> None:
    batched(wrapped, **SAMPLED, temperature=0.7)
    assert wrapped.compiled.stats().slow_paths == {}
