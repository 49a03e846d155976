"""What trainers and evaluations do with a model between two steps: rollouts, scoring, hidden states, sleep.

python tools/bench/loops.py --model qwen3-0.6b --contenders hf-eager,ours,vllm --json loops.json
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from common import Commit, Contenders, DeviceName, Json, Model, Vllm, bench
from engines import VLLM, EngineContender, VllmEngine
from models import vocabulary_of
from torch import Tensor
from transformers import GenerationConfig

from compiled_llm.commands.bench import contenders as ours
from compiled_llm.commands.bench.contenders import BenchSession, Contender
from compiled_llm.commands.bench.load import Asked
from compiled_llm.commands.bench.timing import Spread, Workload
from compiled_llm.engine.engine import Engine
from compiled_llm.requests.sampling_params import SamplingParams

SCORED_AT_ONCE = 32
"""Rows of a call that scores; an evaluation harness is given a number like this, and has one by default."""
Task = Callable[[], int]
"""Returns how many tokens it has generated or scored; 0 if its seconds are what counts."""


@dataclass(frozen=True)
class Loops:
    """What is run on a model, by HuggingFace's calls. Shapes: B rows, T tokens."""

    model: Any
    prompts: int
    answers: int
    prompt: int
    new: int
    scored: int

    def all(self) -> Iterator[dict[str, Task]]:
        """Yield the tasks, together those that take turns."""
        rollouts = f"rollouts, {self.prompts} x {self.answers} answers of {self.new} tokens"
        yield {f"{rollouts}, generate": self._rollouts}
        yield {f"{rollouts}, generate_batch": self._rollouts_batched}
        alone = max(1, self.scored // SCORED_AT_ONCE)
        at_once = f"scoring, {self.scored:,} texts, {SCORED_AT_ONCE} in a call"
        yield {at_once: partial(self._score, self.scored, SCORED_AT_ONCE)}
        yield {f"scoring, {alone:,} texts, one in a call": partial(self._score, alone, 1)}
        yield from self._with_each_number_of_layers("generate", self._generate)

    def of_an_engine(self, engine: Engine) -> Iterator[dict[str, Task]]:
        """Yield those tasks of an engine's that have one of ``generate`` beside them."""
        params = SamplingParams(temperature=0.0, max_tokens=self.new, ignore_eos=True)

        def answer(rows: int, layers: list[int]) -> int:
            outputs = engine.generate(self._ids(rows).tolist(), params, hidden_states=layers or None)
            assert not layers or all(output.hidden_states for output in outputs)
            return sum(len(output.token_ids) for output in outputs)

        yield from self._with_each_number_of_layers("engine", answer)

    def _with_each_number_of_layers(
        self, path: str, task: Callable[[int, list[int]], int]
    ) -> Iterator[dict[str, Task]]:
        last = self.model.config.get_text_config(decoder=True).num_hidden_layers
        asked = {
            "without hidden states": [],
            "hidden states of 4 layers": [1, last // 3, 2 * last // 3, last],
            "hidden states of all layers": list(range(last + 1)),
        }
        for rows in dict.fromkeys((1, min(32, self.prompts))):
            what = f"{path}, {rows} row{'s' * (rows > 1)}"
            yield {f"{what}, {name}": partial(task, rows, layers) for name, layers in asked.items()}

    def _ids(self, rows: int) -> Tensor:
        """``[B, T]``"""
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        return torch.randint(1, vocabulary, (rows, self.prompt), device=self.model.device)

    def _sampling(self) -> dict[str, Any]:
        return {"max_new_tokens": self.new, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

    def _rollouts(self) -> int:
        ids = self._ids(self.prompts)
        options = {**self._sampling(), "num_return_sequences": self.answers}
        out = self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        return int(out[:, self.prompt :].numel())

    def _rollouts_batched(self) -> int:
        ids = self._ids(self.prompts).repeat_interleave(self.answers, dim=0).tolist()
        settings = GenerationConfig(**self._sampling(), pad_token_id=0, eos_token_id=-1)
        outputs = self.model.generate_batch(ids, generation_config=settings, progress_bar=False)
        return sum(len(output.generated_tokens) for output in outputs.values())

    @torch.no_grad()
    def _score(self, texts: int, at_once: int) -> int:
        tokens = 0
        for begin in range(0, texts, at_once):
            ids = self._ids(min(at_once, texts - begin))
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
            logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum().item()
            tokens += ids.numel()
        return tokens

    def _generate(self, rows: int, layers: list[int]) -> int:
        ids = self._ids(rows)
        options = {"max_new_tokens": self.new, "do_sample": False, "return_dict_in_generate": True}
        out = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), output_hidden_states=layers or None, **options
        )
        return rows * len(out.hidden_states) if layers else int(out.sequences[:, self.prompt :].numel())


def naps(engine: Engine) -> dict[str, Task]:
    """Return what an engine does around a training step."""

    def call(method: Callable[[], object]) -> int:
        method()
        return 0

    return {"sleep": partial(call, engine.sleep), "wake": partial(call, engine.wake)}


def main(
    model: Model = "qwen3-0.6b",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a rollout.")] = 32,
    answers: Annotated[int, typer.Option(min=1, help="Answers to each.")] = 8,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens in each prompt, and in each text that is scored.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 512,
    scored: Annotated[int, typer.Option(min=1, help="Texts that are scored.")] = 4000,
    contenders: Contenders = "hf-eager,ours,vllm",
    runs: Annotated[int, typer.Option(min=1, help="Timed runs, after one that is not.")] = 3,
    device: DeviceName = "auto",
    vllm: Vllm = "",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure rollouts, scoring and hidden states by HuggingFace's calls, hidden states and sleep of an engine, and
    rollouts by vLLM.
    """
    rows = prompts * answers
    with bench(model, device, [Workload(rows, prompt, new)], json, commit) as run:
        setup = run.setup

        def report(name: str, task: str, tokens: int, seconds: list[float]) -> None:
            spread = Spread.of_rates(tokens / one for one in seconds) if tokens else Spread.of_times(seconds)
            figures = {"tokens_per_s" if tokens else "seconds": spread._asdict()}
            result = {"contender": name, "task": task, "tokens": tokens, "seconds": seconds}
            run.add("loops", {**result, "figures": figures})

        def timed(task: Task) -> tuple[int, float]:
            setup.synchronize()
            start = time.perf_counter()
            tokens = task()
            setup.synchronize()
            return tokens, time.perf_counter() - start

        def measure_each(name: str, tasks: dict[str, Task]) -> None:
            """Take turns between tasks, as what sleeps has to wake."""
            found: dict[str, list[tuple[int, float]]] = {task: [] for task in tasks}
            for number in range(1 + runs):
                for task, call in tasks.items():
                    setup.log(f"{name}, {task}, {number} of {runs}")
                    found[task].append(timed(call))
            for task, ((tokens, _), *rest) in found.items():
                report(name, task, tokens, [seconds for _, seconds in rest])

        def measure(contender: Contender) -> None:
            with contender.opened(setup) as session:
                if hasattr(session.model, "compiled"):
                    session.model.compiled.warmup(sorted({1, min(32, prompts), rows}))
                loops = Loops(session.model, prompts, answers, prompt, new, scored)
                for tasks in loops.all():
                    measure_each(contender.name, tasks)
                if hasattr(session.model, "compiled"):
                    measure_our_engine(contender, session, loops)

        def measure_our_engine(contender: Contender, session: BenchSession, loops: Loops) -> None:
            with Engine(session.model) as engine:
                for tasks in loops.of_an_engine(engine):
                    measure_each(contender.name, tasks)
                engine.generate([[5] * prompt] * rows)
                measure_each(contender.name, naps(engine))

        def measure_engine(contender: EngineContender) -> None:
            generator = torch.Generator().manual_seed(0)
            with contender.engine(setup) as engine:

                def rollouts() -> int:
                    ids = torch.randint(1, vocabulary_of(model), (prompts, prompt), generator=generator)
                    texts = ids.repeat_interleave(answers, dim=0).tolist()
                    engine.all([Asked(text, new) for text in texts], 1.0)
                    return rows * new

                task = f"rollouts, {prompts} x {answers} answers of {new} tokens"
                measure_each(contender.name, {task: rollouts})

        wanted = [name.strip() for name in contenders.split(",")]
        in_process = ",".join(name for name in wanted if name != VLLM)
        run.each(ours.choose(in_process, setup.device.type, ours.ALL), measure)
        run.each([VllmEngine(vllm, False)] if VLLM in wanted else [], measure_engine)


if __name__ == "__main__":
    typer.run(main)
