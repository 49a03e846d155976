"""TRL's trainers sample by an engine that `sample_with` gives them, as they would by vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import DistillationConfig, DistillationTrainer, RLOOConfig, RLOOTrainer

import compiled_llm
from compiled_llm import Engine
from compiled_llm.trl import sample_with
from support.rollouts import ANSWER, GROUP, adapters, by_engine, given, policy, ratios_of, reward, trained
from support.tiny_tokenizer import tokenizer

CLOSE = 1e-4
COMMON: dict[str, Any] = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "seed": 3,
    "learning_rate": 1e-2,
    "max_completion_length": ANSWER,
}


@pytest.mark.parametrize(("lora", "sleep"), [(False, True), (True, False)], ids=["full, sleeping", "lora"])
def test_grpo_corrects_by_nothing_and_trains_as_by_the_same_answers(lora: bool, sleep: bool, tmp_path: Path) -> None:
    """Log-probabilities of rollouts are the trainer's own of the moment, so what TRL corrects by is 1."""
    model, run, engine, _ = by_engine(tmp_path, sleep=sleep, lora=lora, temperature=0.7)
    assert engine.asleep is sleep
    engine.close()
    assert len(run.answers) == len(run.differences) == 10
    assert max(run.differences) < CLOSE
    ratios = ratios_of(run)
    assert len(ratios) > 10
    assert all(abs(ratio - 1) < 10 * CLOSE for ratio in ratios)
    assert model.compiled.stats().recompiles == 0
    unwrapped = trained(policy(), tmp_path, lora=adapters(lora), rollout_func=given(run.answers), temperature=0.7)
    assert run.answers == unwrapped.answers
    torch.testing.assert_close(run.forward, unwrapped.forward, rtol=0, atol=100 * CLOSE)


def test_greedy_rollouts_are_those_of_an_unwrapped_model(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 6, "entropy_coef": 0.05, "top_k": 1}
    _, run, engine, _ = by_engine(tmp_path, **options)
    engine.close()
    unwrapped = trained(policy(), tmp_path, **options)
    assert run.answers == unwrapped.answers


def prompts(count: int) -> Dataset:
    return Dataset.from_list([{"prompt": text} for text in ("abc", "hello you", "one", "the")] * count)


def trainer_of(kind: str, model: Any, folder: Path, steps: int, lora: bool) -> Any:
    letters = tokenizer()
    letters.padding_side = "left"
    drawn = {"top_k": 1, "temperature": 0.7}
    common = {**COMMON, "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": GROUP, **drawn}
    given = {"train_dataset": prompts(steps), "processing_class": letters, "peft_config": adapters(lora)}
    if kind == "rloo":
        return RLOOTrainer(model, reward, args=RLOOConfig(num_generations=GROUP, beta=0.0, **common), **given)
    return DistillationTrainer(model, policy(seed=1), args=DistillationConfig(**common), **given)


def answers_of(trainer: Any) -> list[list[list[int]]]:
    """Train; return the tokens of each rollout's answers."""
    own, answers = trainer._generate, list[list[list[int]]]()

    def kept(*args: Any) -> Any:
        found = own(*args)
        answers.append(found[1])
        return found

    trainer._generate = kept
    trainer.train()
    return answers


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["rloo", "distillation"])
def test_greedy_rollouts_of_other_trainers_are_those_of_an_unwrapped_model(
    kind: str, lora: bool, tmp_path: Path, whole: bool
) -> None:
    steps = 20 if whole else 4
    model = compiled_llm.wrap(policy(), mode="eager", progress=False)
    trainer = trainer_of(kind, model, tmp_path, steps, lora)
    with Engine(model, tokenizer=tokenizer(), logprobs_mode="processed_logprobs") as engine:
        sample_with(engine, trainer)
        answers = answers_of(trainer)
        assert engine.stats().finished >= sum(map(len, answers))
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not model.compiled.stats().generate_calls, "no call of generate is the trainer's"
    assert answers == answers_of(trainer_of(kind, policy(), tmp_path, steps, lora))
    assert not whole or len({str(rollout) for rollout in answers}) > len(prompts(1)), "weights have changed answers"
