"""Steps of TRL's GRPO by who answers its prompts: seconds of rollouts and of what follows them, and peaks of memory.

python tools/bench/grpo.py --model qwen3-0.6b --json grpo.json

Needs TRL 1.16.
"""

from __future__ import annotations

import os
import random
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args

import torch
import typer
from common import Commit, Contenders, DeviceName, Json, Model, bench
from models import made_up_tokenizer, vocabulary_of
from transformers import PreTrainedTokenizerFast, TrainerCallback

from compiled_llm.commands.bench.contenders import Contender, Setup, choose, wrapped
from compiled_llm.commands.bench.timing import Spread, Workload
from compiled_llm.config import Mode, WrapConfig
from compiled_llm.engine.engine import Engine
from compiled_llm.kvcache.cuda_virtual_memory import mapped_bytes
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.trl import sample_with

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # of a `rollout_func`

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

STEP, ROLLOUT, WAKE, SLEEP = "step", "rollout", "wake", "sleep"
RolloutFunc = Callable[[list[str], GRPOTrainer], dict[str, Any]]


@dataclass(frozen=True)
class Grpo:
    """What a step does: so many prompts, answers to each, and their tokens; gradients are of ``micro`` at once."""

    prompts: int
    answers: int
    prompt: int
    new: int
    micro: int

    @property
    def rows(self) -> int:
        return self.prompts * self.answers

    @property
    def tokens(self) -> int:
        return self.rows * self.new

    def __str__(self) -> str:
        asked = f"{self.prompts} prompts of {self.prompt} tokens x {self.answers} answers of {self.new}"
        return f"{asked}, micro batches of {self.micro}"

    def texts(self, steps: int) -> Dataset:
        """Prompts of all steps, none twice: a letter is a token of `made_up_tokenizer`."""
        letters = random.Random(0)
        drawn = ["".join(letters.choices(string.ascii_letters, k=self.prompt)) for _ in range(steps * self.prompts)]
        return Dataset.from_dict({"prompt": drawn})

    def config(self, steps: int, folder: str, cpu: bool, **options: Any) -> GRPOConfig:
        return GRPOConfig(
            output_dir=folder,
            use_cpu=cpu,
            max_steps=steps,
            num_generations=self.answers,
            max_completion_length=self.new,
            per_device_train_batch_size=self.micro,
            gradient_accumulation_steps=self.rows // self.micro,
            gradient_checkpointing=True,
            bf16=False,  # the weights are in the type that they train in
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )


@dataclass
class StepClock(TrainerCallback):
    """Takes times of steps and of their parts, the device idle before and after, and peaks of its memory."""

    setup: Setup
    steps: list[dict[str, float]] = field(default_factory=list)  # seconds by part, of each step
    # the most bytes at once in rollouts and in the rest of steps; pages count as long as they are mapped
    memory: dict[str, float] = field(default_factory=dict)
    _began: float = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.setup.log(f"step {len(self.steps)}, of which the first is not timed")
        self.steps.append({})
        self._began = self._now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps[-1][STEP] = self._now() - self._began
        self.note_peak("peak of the rest")

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = self._now()
        yield
        self.steps[-1][name] = self._now() - began

    def note_peak(self, name: str) -> None:
        """Keep the peak since the last call of this; what gives pages back calls it before."""
        if self.setup.device.type == "cuda":
            mapped = mapped_bytes(self.setup.device)
            for key, nbytes in (("pages", mapped), (name, torch.cuda.max_memory_allocated() + mapped)):
                self.memory[key] = max(self.memory.get(key, 0), nbytes)
            torch.cuda.reset_peak_memory_stats()

    def _now(self) -> float:
        self.setup.synchronize()
        return time.perf_counter()


class TimedTrainer(GRPOTrainer):
    """Times its rollouts, from prompts of text to answers of text, and counts their tokens."""

    def __init__(self, clock: StepClock, asked: Grpo, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, callbacks=[clock], **kwargs)
        self.clock, self.asked = clock, asked

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self.clock.part(ROLLOUT):
            found = super()._generate(*args, **kwargs)
        self.clock.note_peak("peak of rollouts")
        if (tokens := sum(map(len, found[1]))) != self.asked.tokens:
            raise RuntimeError(f"{tokens} tokens came instead of {self.asked.tokens}")
        return found


class Policy(Contender):
    """A model that TRL trains, and who answers its prompts: HuggingFace's `generate`, or `generate_batch`."""

    def __init__(self, name: str, batched: bool) -> None:
        self.name, self.batched = name, batched

    @contextmanager
    def policy(
        self, clock: StepClock, asked: Grpo, tokenizer: PreTrainedTokenizerFast
    ) -> Iterator[tuple[Any, RolloutFunc | None]]:
        """The model, and a `rollout_func` if TRL is not to call the model."""
        yield clock.setup.model(), None

    def attach(self, trainer: GRPOTrainer) -> None:
        """Have something else sample for a trainer that was made."""


class OurPolicy(Policy):
    """The wrapped model; a mode that is not named is `wrap`'s choice."""

    def __init__(self, kind: str, mode: Mode | None) -> None:
        super().__init__(":".join(filter(None, ["compiled-llm", kind, mode])), batched=True)
        self.mode: Mode = WrapConfig.mode if mode is None else mode

    @contextmanager
    def policy(
        self, clock: StepClock, asked: Grpo, tokenizer: PreTrainedTokenizerFast
    ) -> Iterator[tuple[Any, RolloutFunc | None]]:
        with wrapped(clock.setup, asked.rows, mode=self.mode) as model:
            yield model, None


class OverEngine(OurPolicy):
    """An engine of the wrapped model, which sleeps while TRL trains."""

    def __init__(self, mode: Mode | None, logprobs: bool) -> None:
        super().__init__("engine", mode)
        self.logprobs = logprobs

    @contextmanager
    def policy(
        self, clock: StepClock, asked: Grpo, tokenizer: PreTrainedTokenizerFast
    ) -> Iterator[tuple[Any, RolloutFunc | None]]:
        wanted = {"logprobs": 0} if self.logprobs else {}
        params = SamplingParams(temperature=1.0, max_tokens=asked.new, ignore_eos=True, **wanted)
        with (
            super().policy(clock, asked, tokenizer) as (model, _),
            Engine(model, tokenizer=tokenizer, max_num_seqs=asked.rows) as engine,
        ):

            def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
                with clock.part(WAKE):
                    engine.wake()
                with disable_gradient_checkpointing(trainer.model):
                    outputs = engine.generate(prompts, params)
                clock.note_peak("peak of rollouts")
                with clock.part(SLEEP):
                    engine.sleep()
                return {
                    "prompt_ids": [output.prompt_token_ids for output in outputs],
                    "completion_ids": [output.token_ids for output in outputs],
                    "logprobs": [logprobs_of(output) for output in outputs] if self.logprobs else None,
                }

            yield model, rollout


class BySampleWith(OurPolicy):
    """An engine that `sample_with` gives the trainer, and that sleeps while TRL trains."""

    def __init__(self, mode: Mode | None) -> None:
        super().__init__("sample-with", mode)
        self._engine: Engine | None = None

    @contextmanager
    def policy(
        self, clock: StepClock, asked: Grpo, tokenizer: PreTrainedTokenizerFast
    ) -> Iterator[tuple[Any, RolloutFunc | None]]:
        with (
            super().policy(clock, asked, tokenizer) as (model, _),
            Engine(model, tokenizer=tokenizer, max_num_seqs=asked.rows) as self._engine,
        ):
            yield model, None

    def attach(self, trainer: GRPOTrainer) -> None:
        assert self._engine is not None
        trainer.args.generation_kwargs = {"ignore_eos": True}  # what no answer has is no token, either
        trainer.eos_token_ids = []
        sample_with(self._engine, trainer, sleep=True)


def logprobs_of(output: Any) -> list[float]:
    return [next(iter(token.values())).logprob for token in output.outputs[0].logprobs]


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose end is one token more than the model has, so that no answer ends by itself."""
    tokenizer = made_up_tokenizer(vocabulary + 1)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(set(text))) for text in completions]


def result_of(name: str, asked: Grpo, steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Figures of all steps but the first, which also compiles and captures."""
    first, *timed = steps
    rest = [step[STEP] - step[ROLLOUT] for step in timed]
    figures = {part: Spread.of_times(step[part] for step in timed)._asdict() for part in timed[0]}
    figures["rest"] = Spread.of_times(rest)._asdict()
    figures["tokens_per_s"] = Spread.of_rates(asked.tokens / step[ROLLOUT] for step in timed)._asdict()
    return {
        "contender": name,
        "workload": str(asked),
        "new_tokens": asked.tokens,
        "steps": list(steps),
        "first_step_s": first[STEP],
        "figures": figures,
    }


def main(
    model: Model = "qwen3-0.6b",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a step.")] = 32,
    answers: Annotated[int, typer.Option(min=2, help="Answers to each.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens in each prompt.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 512,
    micro: Annotated[int, typer.Option(min=1, help="Answers that are trained on at once; divides all of them.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps, after one that is not.")] = 2,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="Engines also return those of answers.")] = False,
    contenders: Contenders = "hf-generate,hf-generate-batch,compiled-llm:generate-batch,compiled-llm:engine",
    device: DeviceName = "auto",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure steps of GRPO, with rollouts by HuggingFace's calls and by an engine that sleeps in between."""
    asked = Grpo(prompts, answers, prompt, new, micro)
    if asked.rows % micro:
        raise typer.BadParameter(f"--micro: {micro} does not divide {asked.rows} answers; give a divisor of these")
    known: list[Policy] = [Policy("hf-generate", batched=False), Policy("hf-generate-batch", batched=True)]
    for mode in (None, *get_args(Mode)):
        known += [OurPolicy("generate-batch", mode), OverEngine(mode, logprobs), BySampleWith(mode)]
    with bench(model, device, [Workload(asked.rows, prompt, new)], json, commit) as run:
        tokenizer = tokenizer_of(vocabulary_of(model))

        def measure(contender: Policy) -> None:
            run.setup.drop_model()  # which the last contender has trained
            clock = StepClock(run.setup)
            options = {"use_transformers_continuous_batching": contender.batched}
            with (
                tempfile.TemporaryDirectory() as folder,
                contender.policy(clock, asked, tokenizer) as (policy, rollout),
            ):
                trainer = TimedTrainer(
                    clock,
                    asked,
                    policy,
                    reward,
                    args=asked.config(1 + steps, folder, not run.is_cuda, **options),
                    train_dataset=asked.texts(1 + steps),
                    processing_class=tokenizer,
                    rollout_func=rollout,
                )
                contender.attach(trainer)
                trainer.train()
                if clock.memory:
                    weights = float(sum(weight.nbytes for weight in policy.parameters()))
                    run.report.memory[contender.name] = {"weights": weights, **clock.memory}
            run.add("grpo", result_of(contender.name, asked, clock.steps))

        run.each(choose(contenders, run.setup.device.type, known), measure)


if __name__ == "__main__":
    typer.run(main)
