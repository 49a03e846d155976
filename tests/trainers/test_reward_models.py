"""A wrapped classifier is a reward model of TRL's: its rewards are those of the unwrapped one, rollout by rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3ForSequenceClassification
from trl import GRPOConfig

import compiled_llm
from support.rollouts import ANSWER, GROUP, Recorded, given, policy
from support.tiny_tokenizer import tokenizer


def judge() -> Any:
    """A classifier with one label; the first prompt token that is padding is none of a text."""
    letters, config = tokenizer(), policy().config
    config.num_labels, config.pad_token_id = 1, letters.pad_token_id
    torch.manual_seed(0)
    return Qwen3ForSequenceClassification(config).eval()


def run(folder: Path, reward: Any, **options: Any) -> Recorded:
    letters, judges = tokenizer(), tokenizer()
    letters.padding_side = "left"
    config = GRPOConfig(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
        seed=3,
        max_steps=4,
        learning_rate=1e-2,
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        max_completion_length=ANSWER,
    )
    prompts = Dataset.from_list([{"prompt": text} for text in ("abc", "hello you", "one", "the")] * 4)
    trainer = Recorded(
        policy(),
        reward,
        args=config,
        train_dataset=prompts,
        processing_class=letters,
        reward_processing_classes=judges,
        **options,
    )
    trainer.train()
    return trainer


def test_rewards_of_a_wrapped_model_are_those_of_the_unwrapped_one(tmp_path: Path) -> None:
    plain = run(tmp_path, judge())
    wrapped = compiled_llm.wrap(judge(), mode="eager", progress=False)
    ours = run(tmp_path, wrapped, rollout_func=given(plain.answers))
    assert ours.answers == plain.answers
    assert len({round(float(reward), 4) for reward in torch.cat(plain.rewards).flatten()}) > GROUP
    torch.testing.assert_close(ours.rewards, plain.rewards, rtol=1e-4, atol=1e-5)
    stats = wrapped.compiled.stats()
    assert stats.forward_calls["compiled"] == len(plain.rewards)
    assert not stats.slow_paths
