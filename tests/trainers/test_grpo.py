"""GRPO of TRL over a wrapped policy: one copy of the weights, nothing stale, and the training of an unwrapped model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import compiled_llm
from compiled_llm import Engine
from support.rollouts import (
    WITH_LOGPROBS,
    OverGenerateBatch,
    Recorded,
    adapters,
    given,
    over_engine,
    policy,
    trained,
)
from support.tiny_tokenizer import tokenizer

CLOSE = 1e-4
WAYS = ("generate_batch", "engine")


def wrapped_run(way: str, folder: Path, lora: bool, greedy: bool = False, **options: Any) -> tuple[Any, Recorded]:
    model = compiled_llm.wrap(policy(), mode="eager", progress=False)
    if way == "generate_batch":
        return model, trained(model, folder, trainer=OverGenerateBatch, lora=adapters(lora), **WITH_LOGPROBS, **options)
    with Engine(model, tokenizer=tokenizer()) as engine:
        rollout = over_engine(engine, temperature=0.0 if greedy else 1.0)
        return model, trained(model, folder, lora=adapters(lora), rollout_func=rollout, **options)


def assert_same(run: Recorded, other: Recorded) -> None:
    assert run.answers == other.answers
    torch.testing.assert_close(run.rewards, other.rewards)
    torch.testing.assert_close(run.forward, other.forward, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("way", WAYS)
def test_rollouts_have_the_weights_of_the_moment_and_training_is_that_of_an_unwrapped_model(way, lora, tmp_path):
    model, run = wrapped_run(way, tmp_path, lora)
    rollouts = len(run.answers)
    assert rollouts == 10
    assert len(run.differences) == rollouts
    print(f"{way}: log-probabilities of rollouts and of the trainer differ by {max(run.differences):.1e} at most")
    assert max(run.differences) < CLOSE
    before, after = run.forward[0], policy_logprobs(run, 0)
    assert (before - after).abs().max() > 100 * CLOSE, "weights have hardly changed"
    stats = model.compiled.stats()
    assert stats.recompiles == 0
    assert set(stats.slow_paths) <= {"forward: fused_head"}  # TRL's fused head
    if way == "generate_batch":
        assert stats.generate_calls == {"engine": rollouts}
        assert any("add_fused_lm_head of trl" in name for name in stats.passed_over)
    unwrapped = trained(policy(), tmp_path, lora=adapters(lora), rollout_func=given(run.answers))
    assert_same(run, unwrapped)


def policy_logprobs(run: Recorded, rollout: int) -> torch.Tensor:
    """Log-probabilities of an early rollout's tokens by the weights at the end."""
    prompts = run.prompts[rollout]
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(prompts, run.answers[rollout], strict=True)]
    model, found = run.accelerator.unwrap_model(run.model).eval(), torch.zeros_like(run.forward[rollout])
    for place, (prompt, ids) in enumerate(zip(prompts, rows, strict=True)):
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
        answer = ids[len(prompt) :]
        found[place, : len(answer)] = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_greedy_rollouts_are_those_of_huggingfaces_generate(way, tmp_path):
    # Equal answers of a group have no advantage: an entropy bonus moves the weights.
    options: dict[str, Any] = {"steps": 6, "entropy_coef": 0.05}
    if way == "generate_batch":
        options["top_k"] = 1
    _, run = wrapped_run(way, tmp_path, lora=False, greedy=True, **options)
    unwrapped = trained(policy(), tmp_path, **{**options, "top_k": 1})
    assert_same(run, unwrapped)
    assert len({str(answers) for answers in run.answers}) > 1


def test_trl_corrects_by_the_log_probabilities_of_a_rollout(tmp_path):
    class Corrected(Recorded):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            # TRL 1.16 corrects if vLLM samples: it synchronises weights, which are the policy's own here.
            self.use_vllm, self._last_loaded_step = True, -1
            self.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
            return super().train(*args, **kwargs)

    model = compiled_llm.wrap(policy(), mode="eager", progress=False)
    with Engine(model, tokenizer=tokenizer()) as engine:
        run = trained(model, tmp_path, steps=4, trainer=Corrected, rollout_func=over_engine(engine), logging_steps=1)
    ratios = [log[key] for log in run.state.log_history for key in log if "importance_sampling_ratio/m" in key]
    differences = [log[key] for log in run.state.log_history for key in log if "logp_difference/max" in key]
    assert len(ratios) == 3 * len(differences) > 0
    assert max(differences) < CLOSE
    assert all(abs(ratio - 1) < 10 * CLOSE for ratio in ratios)
