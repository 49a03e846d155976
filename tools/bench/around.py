"""What people come with, by their own tools and by ours: lm-eval's choices, typed decisions, embeddings.

python tools/bench/around.py --model qwen3-8b --what choices,decisions --json around.json
python tools/bench/around.py --model qwen3-0.6b --what embeddings

Each tool answers the same inputs in one go, and answers are compared with those of the first. Choices need lm-eval
0.4.13, and decisions transformers 5.24. Where one is missing, its lines say so, and the rest is measured: on a machine
without a network, unpacked wheels on PYTHONPATH are enough.
"""

from __future__ import annotations

import importlib.util
import random
import string
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any

import torch
import typer
from common import Bench, Commit, DeviceName, Json, Model, bench
from models import made_up_tokenizer, vocabulary_of
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import compiled_llm
from compiled_llm.commands.bench.contenders import Contender, Setup
from compiled_llm.commands.bench.timing import Spread, Workload
from compiled_llm.config import WrapConfig
from compiled_llm.engine.engine import Engine

AT_ONCE = 32
"""Texts of a call of HuggingFace's model; sentence-transformers' own default."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)
Answer = Callable[[Any], Tensor]
"""Answers the inputs of a pass, with numbers that all tools of a task give alike."""


class Tool(Contender):
    """Who answers, and the module that it comes in."""

    def __init__(
        self, name: str, answering: Callable[[Setup], AbstractContextManager[Answer]], needs: str = ""
    ) -> None:
        self.name, self.answering, self._needs = name, answering, needs

    def obstacle(self, setup: Setup) -> str | None:
        if not self._needs or importlib.util.find_spec(self._needs):
            return None
        return f"needs {PACKAGES[self._needs]}, and there is no module {self._needs}"


PACKAGES = {"lm_eval": "lm-eval 0.4.13", "transformers.decision": "transformers 5.24"}
"""What modules come with."""


class Task:
    """Something that tools do.

    Attributes:
        unit: what is counted.
        count: how many of them a pass has.
        longest: the most tokens of a text.
    """

    unit: str
    count: int
    longest: int

    def __init__(self, model: str, mode: str) -> None:
        self._vocabulary, self._mode = vocabulary_of(model), mode

    def inputs(self, number: int) -> Any:
        """Return those of a pass: as long as those of others, and none that another has."""
        raise NotImplementedError

    def tools(self) -> list[Tool]:
        """Return who can do it, ours last."""
        raise NotImplementedError

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        """Return one to which a letter is a token."""
        tokenizer = made_up_tokenizer(self._vocabulary)
        tokenizer.pad_token, tokenizer.chat_template = tokenizer.eos_token, TEMPLATE
        return tokenizer

    @contextmanager
    def _wrapped(self, setup: Setup) -> Iterator[PreTrainedModel]:
        setup.free_memory()  # of the tool before
        model = compiled_llm.wrap(setup.model(), mode=self._mode, progress=False)
        try:
            yield model
        finally:
            compiled_llm.unwrap(model)
            setup.free_memory()

    @contextmanager
    def _engine(self, setup: Setup) -> Iterator[Engine]:
        with self._wrapped(setup) as model, Engine(model, tokenizer=self._tokenizer()) as engine:
            yield engine


class Choices(Task):
    """Log-likelihoods of the choices of questions, as lm-eval asks for them."""

    unit = "choices"

    def __init__(self, model: str, mode: str, questions: int, choices: int, shared: int, tokens: int) -> None:
        super().__init__(model, mode)
        self._questions, self._choices, self._shared, self._tokens = questions, choices, shared, tokens
        self.count, self.longest = questions * choices, shared + tokens

    def __str__(self) -> str:
        return f"{self._questions} questions of {self._shared} tokens, {self._choices} choices of {self._tokens}"

    def inputs(self, number: int) -> list[Any]:
        from lm_eval.api.instance import Instance

        text = texts_of(f"choices {number}")
        pairs = [
            (question, text(self._tokens))
            for question in (text(self._shared) for _ in range(self._questions))
            for _ in range(self._choices)
        ]
        return [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(pairs)]

    def tools(self) -> list[Tool]:
        return [Tool("HFLM", self._theirs, "lm_eval"), Tool("compiled-llm:lm-eval", self._ours, "lm_eval")]

    @contextmanager
    def _theirs(self, setup: Setup) -> Iterator[Answer]:
        from lm_eval.models.huggingface import HFLM

        yield partial(_scores, HFLM(pretrained=setup.model(), tokenizer=self._tokenizer(), batch_size=AT_ONCE))

    @contextmanager
    def _ours(self, setup: Setup) -> Iterator[Answer]:
        from compiled_llm.integrations.lm_eval.model import CompiledLM

        with self._wrapped(setup) as model:
            lm = CompiledLM(pretrained=model, tokenizer=self._tokenizer())
            try:
                yield partial(_scores, lm)
            finally:
                lm.engine.close()


def _scores(lm: Any, asked: Sequence[Any]) -> Tensor:
    """``[N]``"""
    return torch.tensor([score for score, _ in lm.loglikelihood(asked, disable_tqdm=True)])


class DecisionsTask(Task):
    """Probabilities of four options to each question about a state."""

    unit = "questions"

    def __init__(self, model: str, mode: str, questions: int, state: int) -> None:
        super().__init__(model, mode)
        self.count, self._state, self.longest = questions, state, state + 512

    def __str__(self) -> str:
        return f"{self.count} questions about a state of {self._state:,} tokens"

    def inputs(self, number: int) -> dict[str, Any]:
        text = texts_of(f"decisions {number}")
        questions = {
            f"q{place}": {
                "type": "choice",
                "instructions": text(30),
                "criteria": {option: text(10) for option in ("first", "second", "third", "fourth")},
            }
            for place in range(self.count)
        }
        return {"state": text(self._state), "questions": questions}

    def tools(self) -> list[Tool]:
        needs = "transformers.decision"
        return [Tool("pipeline", self._theirs, needs), Tool("compiled-llm:decide", self._ours, needs)]

    @contextmanager
    def _theirs(self, setup: Setup) -> Iterator[Answer]:
        from transformers import pipeline

        asks = pipeline("decision", model=setup.model(), tokenizer=self._tokenizer(), device=setup.device)
        yield lambda request: _probabilities(asks(request))

    @contextmanager
    def _ours(self, setup: Setup) -> Iterator[Answer]:
        with self._engine(setup) as engine:
            yield lambda request: _probabilities(engine.decide(request["state"], request["questions"]))


def _probabilities(answers: dict[str, Any]) -> Tensor:
    """``[questions, options]``"""
    return torch.tensor([[*answer["probabilities"].values()] for answer in answers.values()])


class Embeddings(Task):
    """Vectors of texts: the last token's hidden state, as long as 1."""

    unit = "texts"

    def __init__(self, model: str, mode: str, texts: int, least: int, most: int) -> None:
        super().__init__(model, mode)
        lengths = random.Random(0)
        self._lengths = [lengths.randint(least, most) for _ in range(texts)]
        self.count, self.longest = texts, most
        self._said = f"{texts} texts of {least} to {most} tokens"

    def __str__(self) -> str:
        return self._said

    def inputs(self, number: int) -> list[str]:
        return [*map(texts_of(f"embeddings {number}"), self._lengths)]

    def tools(self) -> list[Tool]:
        return [
            Tool("hf:one-by-one", partial(self._theirs, 1)),
            Tool(f"hf:batches-of-{AT_ONCE}", partial(self._theirs, AT_ONCE)),
            Tool("compiled-llm:embed", self._ours),
        ]

    @contextmanager
    def _theirs(self, at_once: int, setup: Setup) -> Iterator[Answer]:
        """Batches of texts sorted by length, the longest first, as sentence-transformers runs them."""
        model: Any = setup.model().base_model
        tokenizer, width = self._tokenizer(), model.config.get_text_config(decoder=True).hidden_size

        @torch.inference_mode()
        def answer(texts: Sequence[str]) -> Tensor:
            vectors = torch.empty(len(texts), width)
            order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
            for begin in range(0, len(order), at_once):
                places = order[begin : begin + at_once]
                batch = tokenizer([texts[place] for place in places], padding=True, return_tensors="pt").to(
                    model.device
                )
                states = model(**batch, use_cache=False).last_hidden_state
                last = states[torch.arange(len(places)), batch["attention_mask"].sum(1) - 1]
                vectors[places] = torch.nn.functional.normalize(last.float(), dim=-1).cpu()
            return vectors

        yield answer

    @contextmanager
    def _ours(self, setup: Setup) -> Iterator[Answer]:
        with self._engine(setup) as engine:
            yield partial(engine.embed, pooling="last")


def texts_of(name: str) -> Callable[[int], str]:
    """Return what draws texts of so many letters; others for each name."""
    draw = random.Random(name)
    return lambda length: "".join(draw.choices(string.ascii_letters, k=length))


@dataclass
class Compared:
    """Times the tools of a task, and compares their answers with those of the first."""

    run: Bench
    task: Task
    runs: int
    first: Tensor | None = None

    def measure(self, tool: Tool) -> None:
        seconds, setup = [], self.run.setup
        with tool.answering(setup) as answer:
            for number in range(1 + self.runs):
                setup.log(f"{self.task}, {tool.name}, {number} of {self.runs}")
                given = self.task.inputs(number)
                setup.synchronize()
                start = time.perf_counter()
                found = answer(given)
                setup.synchronize()
                seconds.append(time.perf_counter() - start)
        if self.first is None:
            self.first = found
        timed = seconds[1:]  # the first pass also compiles
        self.run.add(
            "around",
            {
                "contender": tool.name,
                "task": str(self.task),
                "unit": self.task.unit,
                "seconds": timed,
                "first_pass_s": seconds[0],
                "differs": float((found - self.first).abs().max()),
                "figures": {
                    "seconds": Spread.of_times(timed)._asdict(),
                    "per_s": Spread.of_rates(self.task.count / one for one in timed)._asdict(),
                },
            },
        )


TASKS = ("choices", "decisions", "embeddings")


def main(
    model: Model = "qwen3-0.6b",
    what: Annotated[str, typer.Option(help="What is measured, comma-separated.")] = ",".join(TASKS),
    questions: Annotated[int, typer.Option(min=1, help="Questions with choices.")] = 32,
    choices: Annotated[int, typer.Option(min=2, help="Choices of each.")] = 4,
    shared: Annotated[int, typer.Option(min=1, help="Tokens of each of these questions.")] = 500,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each choice.")] = 20,
    decisions: Annotated[int, typer.Option(min=1, help="Typed questions about a state.")] = 20,
    state: Annotated[int, typer.Option(min=1, help="Tokens of the state.")] = 4096,
    texts: Annotated[int, typer.Option(min=1, help="Texts of which vectors are wanted.")] = 512,
    least: Annotated[int, typer.Option(min=1, help="Fewest tokens of a text.")] = 20,
    most: Annotated[int, typer.Option(min=1, help="Most tokens of a text.")] = 500,
    runs: Annotated[int, typer.Option(min=1, help="Timed passes, after one that is not.")] = 3,
    mode: Annotated[str, typer.Option(help="As `wrap` takes it.")] = WrapConfig.mode,
    device: DeviceName = "auto",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure choices, decisions and embeddings by the tools that people have, and by ours."""
    names = [name.strip() for name in what.split(",") if name.strip()]
    if unknown := [name for name in names if name not in TASKS]:
        raise typer.BadParameter(f"--what: no {', '.join(unknown)}; there are {', '.join(TASKS)}")
    if most < least:
        raise typer.BadParameter(f"--most: {most} is less than --least, {least}")
    known: dict[str, Task] = {
        "choices": Choices(model, mode, questions, choices, shared, tokens),
        "decisions": DecisionsTask(model, mode, decisions, state),
        "embeddings": Embeddings(model, mode, texts, least, most),
    }
    tasks = [known[name] for name in names]
    with bench(model, device, [Workload(1, max(task.longest for task in tasks), 2)], json, commit) as run:
        if importlib.util.find_spec("lm_eval"):
            run.report.machine["versions"]["lm-eval"] = version("lm_eval")
        for task in tasks:
            run.each(task.tools(), Compared(run, task, runs).measure)


if __name__ == "__main__":
    typer.run(main)
