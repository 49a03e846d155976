"""What TRL's trainers and HuggingFace's leave on a wrapped model does not slow down its ``generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import compiled_llm
from support.rollouts import policy
from support.tiny_tokenizer import tokenizer

IDS = torch.tensor([[5, 6, 7, 8]])


def common(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
    }


def fine_tuned(model: Any, folder: Path) -> None:
    texts = Dataset.from_list([{"text": "hello you are"}] * 8)
    arguments = SFTConfig(**common(folder), bf16=False, max_length=32)
    SFTTrainer(model, args=arguments, train_dataset=texts, processing_class=tokenizer()).train()


def preferring(model: Any, folder: Path) -> None:
    pairs = Dataset.from_list([{"prompt": "hello", "chosen": " you are", "rejected": " no"}] * 8)
    arguments = DPOConfig(**common(folder), bf16=False, max_length=32)
    letters = tokenizer()
    DPOTrainer(model, ref_model=policy(), args=arguments, train_dataset=pairs, processing_class=letters).train()


def generated(model: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(IDS, max_new_tokens=6, do_sample=False)
    return tokens


@pytest.mark.parametrize("train", [fine_tuned, preferring], ids=["SFT", "DPO"])
def test_a_trained_model_takes_the_fast_loop(train, tmp_path):
    plain, model = policy(), compiled_llm.wrap(policy(), mode="eager", progress=False)
    for each in (plain, model):
        train(each, tmp_path)
    assert "forward" in vars(model)
    plain.activation_checkpointing_disable()
    model.activation_checkpointing_disable()
    assert torch.equal(generated(model), generated(plain))
    assert model.training
    stats = model.compiled.stats()
    assert stats.generate_calls == {"fast loop": 1}
    assert len(stats.passed_over) == 2  # the forward, and hooks


def test_mixed_precision_is_named_with_the_call_that_takes_it_off(tmp_path):
    model = compiled_llm.wrap(policy(), mode="eager", progress=False)
    texts = Dataset.from_list([{"text": "hello you are"}] * 8)
    arguments = SFTConfig(**common(tmp_path), bf16=True, gradient_checkpointing=False, max_length=32)
    trainer = SFTTrainer(model, args=arguments, train_dataset=texts, processing_class=tokenizer())
    trainer.train()
    generated(model)
    (reason,) = model.compiled.counters.slow_generates
    assert "accelerator.unwrap_model(model, keep_fp32_wrapper=False)" in str(reason)
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    generated(model)
    assert model.compiled.stats().generate_calls == {"original": 1, "fast loop": 1}


class Generating(TrainerCallback):
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        generated(kwargs["model"])


def test_evaluation_takes_the_compiled_forward_and_the_fast_loop(tmp_path):
    rows = Dataset.from_list([{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 8)
    plain, model = policy(), compiled_llm.wrap(policy(), mode="eager", progress=False)
    losses = []
    for each in (plain, model):
        trainer = Trainer(each, args=TrainingArguments(**common(tmp_path)), eval_dataset=rows, callbacks=[Generating()])
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    stats = model.compiled.stats()
    assert stats.slow_paths == {}
    assert set(stats.forward_calls) == {"compiled"}
    assert set(stats.generate_calls) == {"fast loop"}
