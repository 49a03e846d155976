"""Steps of TRL's GRPO by who answers its prompts: seconds of rollouts and of what follows them, and peaks of memory.

python tools/bench/grpo.py --model qwen3-0.6b --logprobs --json grpo.json
python tools/bench/grpo.py --model qwen3-0.6b --tools 4 --new 128 --json grpo-tools.json

Needs TRL 1.16, whose prompts are in memory. On a machine without a network, wheels of trl, datasets, dill and
multiprocess on PYTHONPATH are enough beside pandas, pyarrow and xxhash.
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
from importlib.metadata import version
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

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.models.utils import disable_gradient_checkpointing
except ImportError as error:
    raise SystemExit(
        f"grpo.py: needs TRL 1.16, and there is no module {error.name}: pip install 'trl==1.16.*'"
    ) from error

STEP, ROLLOUT, WAKE, SLEEP = "step", "rollout", "wake", "sleep"
TOLD = "x" * 64
"""What a tool says: a letter is a token."""
MARKS = 32
"""Most tokens that the template has around a prompt, and around what a tool says."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %} "
    "{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
RolloutFunc = Callable[[list[str], GRPOTrainer], dict[str, Any]]


@dataclass(frozen=True)
class Grpo:
    """What a step does: so many prompts, answers to each, and their tokens; gradients are of ``micro`` at once.

    An answer has so many turns of ``new`` tokens, each but the last with a call of a tool.
    """

    prompts: int
    answers: int
    prompt: int
    new: int
    micro: int
    turns: int = 1

    @property
    def rows(self) -> int:
        return self.prompts * self.answers

    @property
    def tokens(self) -> int:
        return self.rows * self.turns * self.new

    @property
    def longest(self) -> tuple[int, int]:
        """The most tokens of a prompt, and of its answer with what tools say."""
        calls = self.turns - 1
        return self.prompt + MARKS * bool(calls), self.turns * self.new + calls * (len(TOLD) + MARKS)

    def __str__(self) -> str:
        turns = f"{self.turns} turns of {self.new}, a tool's {len(TOLD)} between them" if self.turns > 1 else self.new
        asked = f"{self.prompts} prompts of {self.prompt} tokens x {self.answers} answers of {turns}"
        return f"{asked}, micro batches of {self.micro}"

    def texts(self, steps: int) -> Dataset:
        """Prompts of all steps, none twice: a letter is a token of `made_up_tokenizer`."""
        letters = random.Random(0)
        drawn = ["".join(letters.choices(string.ascii_letters, k=self.prompt)) for _ in range(steps * self.prompts)]
        chats = [[{"role": "user", "content": text}] for text in drawn]
        return Dataset.from_dict({"prompt": drawn if self.turns == 1 else chats})

    def config(self, steps: int, folder: str, cpu: bool, **options: Any) -> GRPOConfig:
        return GRPOConfig(
            output_dir=folder,
            use_cpu=cpu,
            max_steps=steps,
            num_generations=self.answers,
            max_completion_length=self.longest[1],
            max_tool_calling_iterations=self.turns - 1,
            generation_kwargs={"max_new_tokens": self.new},  # of a turn
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
        _, answers, by_the_model, *_ = found
        tokens = sum(map(len, answers) if by_the_model is None else map(sum, by_the_model))
        if tokens != self.asked.tokens:
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

    def attach(self, trainer: TimedTrainer) -> None:
        """Have something else sample for a trainer that was made."""


class OurPolicy(Policy):
    """The wrapped model; a mode that is not named is `wrap`'s choice."""

    def __init__(self, kind: str, mode: Mode | None, batched: bool = False) -> None:
        super().__init__(":".join(filter(None, ["compiled-llm", kind, mode])), batched)
        self.mode: Mode = WrapConfig.mode if mode is None else mode

    @contextmanager
    def policy(
        self, clock: StepClock, asked: Grpo, tokenizer: PreTrainedTokenizerFast
    ) -> Iterator[tuple[Any, RolloutFunc | None]]:
        with wrapped(clock.setup, asked.rows, mode=self.mode) as model:
            yield model, None


class OverEngine(OurPolicy):
    """An engine of the wrapped model, which sleeps while TRL trains."""

    def __init__(self, mode: Mode | None, logprobs: bool, turns: int) -> None:
        super().__init__("engine", mode)
        self.logprobs, self.turns = logprobs, turns

    def obstacle(self, setup: Setup) -> str | None:
        if self.turns > 1:
            return "a rollout_func has the first turn alone: TRL samples those after tools by the model's generate"
        return super().obstacle(setup)

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

    def attach(self, trainer: TimedTrainer) -> None:
        assert self._engine is not None
        # The end that no answer has is no token, either.
        trainer.args.generation_kwargs = {"ignore_eos": True, "max_tokens": trainer.asked.new}
        trainer.eos_token_ids = []
        sample_with(self._engine, trainer, sleep=True)


def logprobs_of(output: Any) -> list[float]:
    return [next(iter(token.values())).logprob for token in output.outputs[0].logprobs]


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose end is one token more than the model has, so that no answer ends by itself.

    Each answer that it reads calls `look_up`.
    """
    tokenizer = made_up_tokenizer(vocabulary + 1)
    tokenizer.padding_side, tokenizer.chat_template = "left", TEMPLATE
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)

    def parsed(ids: Sequence[int], **_: Any) -> dict[str, Any]:
        call = {"name": look_up.__name__, "arguments": {"what": "letters"}}
        said = tokenizer.decode(ids)
        return {"role": "assistant", "content": said, "tool_calls": [{"type": "function", "function": call}]}

    tokenizer.response_template, tokenizer.parse_response = {}, parsed
    return tokenizer


def look_up(what: str) -> str:
    """Look something up.

    Args:
        what: its name.

    Returns:
        What is known of it.
    """
    return TOLD


def reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """Count the characters that an answer has, those of its turns if it has several."""
    return [float(len(set(str(answer)))) for answer in completions]


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
    tools: Annotated[
        int, typer.Option(min=1, help="Turns of each answer, of --new tokens each; a tool is called between them.")
    ] = 1,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="A rollout_func also has those of answers.")] = False,
    correction: Annotated[
        bool, typer.Option(help="By a forward of its own TRL corrects what sample_with's rollouts were drawn with.")
    ] = True,
    contenders: Contenders = "hf-generate,compiled-llm:generate,compiled-llm:engine,compiled-llm:sample-with",
    device: DeviceName = "auto",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure steps of GRPO, with rollouts by HuggingFace's calls and by an engine that sleeps in between."""
    asked = Grpo(prompts, answers, prompt, new, micro, tools)
    if asked.rows % micro:
        raise typer.BadParameter(f"--micro: {micro} does not divide {asked.rows} answers; give a divisor of these")
    known: list[Policy] = [Policy("hf-generate", batched=False), Policy("hf-generate-batch", batched=True)]
    for mode in (None, *get_args(Mode)):
        known += [OurPolicy("generate", mode), OurPolicy("generate-batch", mode, batched=True)]
        known += [OverEngine(mode, logprobs, tools), BySampleWith(mode)]
    with bench(model, device, [Workload(asked.rows, *asked.longest)], json, commit) as run:
        run.report.machine["versions"]["trl"] = version("trl")
        tokenizer = tokenizer_of(vocabulary_of(model))

        def measure(contender: Policy) -> None:
            run.setup.drop_model()  # which the last contender has trained
            clock = StepClock(run.setup)
            options = {
                "use_transformers_continuous_batching": contender.batched,
                "vllm_importance_sampling_correction": correction,
            }
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
                    tools=[look_up] if tools > 1 else None,
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
