"""Runs of TRL's GRPO on a tiny model, with what they drew and computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

import compiled_llm
from compiled_llm import Engine, SamplingParams
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.trl import sample_with
from support.tiny_models import tiny_qwen3
from support.tiny_tokenizer import tokenizer

ANSWER = 6
"""The most tokens of an answer."""
GROUP = 4
"""Answers to a prompt."""
PROMPTS = tuple({"prompt": text} for text in ("abc", "hello you", "one", "the"))
OF_IMAGES = frozenset({"pixel_values", "image_grid_thw", "num_images", "mm_token_type_ids"})
"""What a training step has of images."""

Rollout = tuple[list[list[int]], list[list[float]]]
"""Tokens of answers, and the log-probability of each."""


def policy(**options: Any) -> Any:
    letters = tokenizer()
    return tiny_qwen3(vocab_size=len(letters), bos_token_id=letters.bos_token_id, **options)


def reward(completions: Sequence[Any], **_: Any) -> list[float]:
    texts = [_text(completion) for completion in completions]
    return [text.count("a") + len(text) / 10 for text in texts]


def _text(completion: Any) -> str:
    """An answer, or all that its turns have said."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)


def adapters(lora: bool) -> LoraConfig | None:
    return LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None


class Recorded(GRPOTrainer):
    """Keeps each rollout, and the log-probabilities by the trainer's own forward, before its weights change."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rewards: list[Tensor] = []  # of each rollout, by answer
        # the trainer's log-probabilities of each rollout's tokens; ``sampled`` those that the rollout gave. prompts,
        # answers: the tokens of each rollout
        self.forward: list[Tensor] = []
        self.sampled: list[Tensor | None] = []
        self.prompts: list[list[list[int]]] = []
        self.answers: list[list[list[int]]] = []

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices=[]):  # of which TRL shuffles answers, whatever has drawn them
            return super()._generate(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        shown = batch["completion_mask"]
        mask = torch.cat([batch["prompt_mask"], shown], dim=1)
        images = {name: value for name, value in batch.items() if name in OF_IMAGES}
        with torch.no_grad(), disable_gradient_checkpointing(self.model):
            forward = self._get_per_token_logps_and_entropies(self.model, ids, mask, shown.shape[1], **images)[0]
        drawn = shown * batch.get("tool_mask", 1)  # and not what tools have said
        self.forward.append(forward * drawn)
        sampled = batch.get("sampling_per_token_logps")
        self.sampled.append(None if sampled is None else sampled * drawn)
        both = zip(batch["completion_ids"].tolist(), shown.sum(1).tolist(), strict=True)
        self.answers.append([tokens[:length] for tokens, length in both])
        both = zip(batch["prompt_ids"].tolist(), batch["prompt_mask"].sum(1).tolist(), strict=True)
        self.prompts.append([tokens[len(tokens) - length :] for tokens, length in both])
        return batch

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        rewards: Tensor = super()._calculate_rewards(*args, **kwargs)
        self.rewards.append(rewards.clone())
        return rewards

    @property
    def differences(self) -> list[float]:
        """The largest difference of each rollout between its own log-probabilities and the trainer's forward."""
        both = zip(self.forward, self.sampled, strict=True)
        return [float((forward - sampled).abs().max()) for forward, sampled in both if sampled is not None]


class OverGenerateBatch(Recorded):
    """TRL's branch over ``generate_batch``, which asks for no log-probabilities and drops them: here they are kept."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        own, outputs = model.generate_batch, {}

        def kept(*args: Any, **kwargs: Any) -> Any:
            outputs.update(own(*args, **kwargs))
            return outputs

        model.generate_batch = kept
        try:
            answers, _ = super()._generate_single_turn(*args, **kwargs)
        finally:
            del model.generate_batch
        return answers, [output.logprobs for output in outputs.values()]


def over_engine(engine: Engine, temperature: float = 1.0) -> Callable[[list[str], GRPOTrainer], dict[str, Any]]:
    """A ``rollout_func`` of TRL's: TRL gives each prompt as often as it wants answers to it."""
    seeds = iter(range(100_000))

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        params = [
            SamplingParams(temperature=temperature, max_tokens=ANSWER, logprobs=0, seed=next(seeds)) for _ in prompts
        ]
        with disable_gradient_checkpointing(trainer.model):
            outputs = engine.generate(prompts, params)
        return {
            "prompt_ids": [output.prompt_token_ids for output in outputs],
            "completion_ids": [output.token_ids for output in outputs],
            "logprobs": [
                [next(iter(one.values())).logprob for one in output.outputs[0].logprobs] for output in outputs
            ],
        }

    return rollout


def given(rollouts: Sequence[list[list[int]]]) -> Callable[[list[str], GRPOTrainer], dict[str, Any]]:
    """A ``rollout_func`` that gives the answers of another run."""
    left, letters = iter(rollouts), tokenizer()

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        answers = next(left)
        ids = letters(prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": [[0.0] * len(answer) for answer in answers]}

    return rollout


def trained(
    model: Any, folder: Path, steps: int = 20, trainer: type[Recorded] = Recorded, lora: Any = None, **options: Any
) -> Recorded:
    """Run GRPO; each rollout serves two optimizer steps, and gradients are checkpointed, as is TRL's default."""
    rollout, tools = options.pop("rollout_func", None), options.pop("tools", None)
    letters, prompts = options.pop("processing_class", None), options.pop("prompts", None)
    config = GRPOConfig(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
        seed=3,
        max_steps=steps,
        learning_rate=1e-2,
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        steps_per_generation=2,
        **{"max_completion_length": ANSWER, **options},
    )
    if letters is None:
        letters = tokenizer()
        letters.padding_side = "left"
    run = trainer(
        model,
        reward,
        args=config,
        train_dataset=Dataset.from_list(list(prompts or PROMPTS) * steps),
        processing_class=letters,
        tools=tools,
        peft_config=lora,
        rollout_func=rollout,
    )
    run.train()
    return run


def by_engine(
    folder: Path, model: Any = None, *, sleep: bool = False, lora: bool = False, processor: Any = None, **options: Any
) -> tuple[Any, Recorded, Engine, list[list[RequestOutput]]]:
    """Run GRPO over an engine that ``sample_with`` gives the trainer.

    Returns the model, the trainer, the engine, which is open, and what the engine has answered, call by call.
    """
    model = compiled_llm.wrap(model or policy(), mode="eager", progress=False)
    engine = Engine(
        model, tokenizer=tokenizer(), processor=processor, logprobs_mode=options.pop("logprobs", "processed_logprobs")
    )
    own, calls = engine.generate, list[list[RequestOutput]]()

    def kept(*args: Any, **kwargs: Any) -> list[RequestOutput]:
        calls.append(own(*args, **kwargs))
        return calls[-1]

    engine.generate = kept  # type: ignore[method-assign]

    class Sampled(Recorded):
        def train(self, *args: Any, **kwargs: Any) -> Any:
            sample_with(engine, self, sleep=sleep)
            return super().train(*args, **kwargs)

    run = trained(model, folder, trainer=Sampled, lora=adapters(lora), logging_steps=1, **options)
    return model, run, engine, calls


def ratios_of(run: Recorded) -> list[float]:
    """What TRL corrects by: the least, mean and most of each step."""
    logs = run.state.log_history
    return [log[key] for log in logs for key in log if "importance_sampling_ratio/m" in key]


WITH_LOGPROBS: dict[str, Any] = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"return_logprobs": True, "seed": 5},
}
