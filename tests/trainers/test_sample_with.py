"""TRL's trainers sample by an engine that `sample_with` gives them, as they would by vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import DistillationConfig, DistillationTrainer, RLOOConfig, RLOOTrainer

import compiled_llm
from compiled_llm import Engine
from compiled_llm.trl import sample_with
from support.rollouts import ANSWER, GROUP, Recorded, given, policy, reward, trained
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


def adapters(lora: bool) -> LoraConfig | None:
    return LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None


def by_engine(folder: Path, *, sleep: bool = False, lora: bool = False, **options: Any) -> tuple[Any, Recorded, Engine]:
    model = compiled_llm.wrap(policy(), mode="eager", progress=False)
    engine = Engine(model, tokenizer=tokenizer(), logprobs_mode="processed_logprobs")

    class Sampled(Recorded):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            sample_with(engine, self, sleep=sleep)
            return super().train(*args, **kwargs)

    run = trained(model, folder, trainer=Sampled, lora=adapters(lora), logging_steps=1, **options)
    return model, run, engine


@pytest.mark.parametrize(("lora", "sleep"), [(False, True), (True, False)], ids=["full, sleeping", "lora"])
def test_grpo_corrects_by_nothing_and_trains_as_by_the_same_answers(lora: bool, sleep: bool, tmp_path: Path) -> None:
    """Log-probabilities of rollouts are the trainer's own of the moment, so what TRL corrects by is 1."""
    model, run, engine = by_engine(tmp_path, sleep=sleep, lora=lora, temperature=0.7)
    assert engine.asleep is sleep
    engine.close()
    assert len(run.answers) == len(run.differences) == 10
    assert max(run.differences) < CLOSE
    ratios = [log[key] for log in run.state.log_history for key in log if "importance_sampling_ratio/m" in key]
    assert len(ratios) > 10
    assert all(abs(ratio - 1) < 10 * CLOSE for ratio in ratios)
    assert model.compiled.stats().recompiles == 0
    unwrapped = trained(policy(), tmp_path, lora=adapters(lora), rollout_func=given(run.answers), temperature=0.7)
    assert run.answers == unwrapped.answers
    torch.testing.assert_close(run.forward, unwrapped.forward, rtol=0, atol=50 * CLOSE)


def test_greedy_rollouts_are_those_of_an_unwrapped_model(tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 6, "entropy_coef": 0.05, "top_k": 1}
    _, run, engine = by_engine(tmp_path, **options)
    engine.close()
    unwrapped = trained(policy(), tmp_path, **options)
    assert run.answers == unwrapped.answers


def prompts(count: int) -> Dataset:
    return Dataset.from_list([{"prompt": text} for text in ("abc", "hello you", "one", "the")] * count)


@pytest.mark.parametrize("kind", ["rloo", "distillation"])
def test_other_trainers_sample_by_it(kind: str, tmp_path: Path) -> None:
    model = compiled_llm.wrap(policy(), mode="eager", progress=False)
    letters = tokenizer()
    letters.padding_side = "left"
    common = {**COMMON, "output_dir": str(tmp_path), "max_steps": 4, "per_device_train_batch_size": GROUP}
    if kind == "rloo":
        args = RLOOConfig(num_generations=GROUP, beta=0.0, **common)
        trainer: Any = RLOOTrainer(model, reward, args=args, train_dataset=prompts(4), processing_class=letters)
    else:
        trainer = DistillationTrainer(
            model,
            policy(),
            args=DistillationConfig(**common),
            train_dataset=prompts(4),
            processing_class=letters,
        )
    with Engine(model, tokenizer=letters, logprobs_mode="processed_logprobs") as engine:
        sample_with(engine, trainer)
        before = engine.stats().finished
        trainer.train()
        assert engine.stats().finished > before + 4
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not model.compiled.stats().generate_calls, "no call of generate is the trainer's"
