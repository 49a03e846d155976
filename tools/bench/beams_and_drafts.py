"""Beam search, drafts, prompt lookup, a chat and scoring: HuggingFace's and ours, on the same weights.

python tools/bench/beams_and_drafts.py --model qwen3-0.6b --new 64
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import typer
from common import Commit, Contenders, DeviceName, Json, Model, bench
from torch import Tensor

from compiled_llm.commands.bench import contenders as ours
from compiled_llm.commands.bench.contenders import Contender
from compiled_llm.commands.bench.timing import Spread, Workload
from compiled_llm.compat.cache_names import cache_in, output_field


@dataclass(frozen=True)
class Tasks:
    """What is run on a model, with another one of the same weights that drafts for it.

    Each task returns how many tokens it generated or scored. Shapes: B rows, T prompt tokens.
    """

    model: Any
    draft: Any
    prompt: int
    new: int
    turns: int
    beams: int
    drafted: int
    rows: int

    def all(self) -> dict[str, Callable[[], int]]:
        return {
            f"beam search, {self.beams} beams": lambda: self._new(num_beams=self.beams),
            f"drafts of {self.drafted}, all of them right": lambda: self._new(assistant_model=self.draft),
            f"prompt lookup, {self.drafted} tokens": lambda: self._new(prompt_lookup_num_tokens=self.drafted),
            f"chat of {self.turns} turns": self._chat,
            f"scoring, {self.rows} rows": self._score,
        }

    def _ids(self, rows: int) -> Tensor:
        """`[B, T]`"""
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        return torch.randint(1, vocabulary, (rows, self.prompt), device=self.model.device)

    def _generate(self, ids: Tensor, **options: Any) -> Any:
        options = {"max_new_tokens": self.new, "do_sample": False, **options}
        return self.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)

    def _new(self, **options: Any) -> int:
        return int(self._generate(self._ids(1), **options).shape[1]) - self.prompt

    def _chat(self) -> int:
        ids, given = self._ids(1), dict[str, Any]()
        for _ in range(self.turns):
            out = self._generate(ids, return_dict_in_generate=True, **given)
            given = {output_field(type(out)): cache_in(out)}
            ids = torch.cat([out.sequences, self._ids(1)], dim=1)
        return self.turns * self.new

    @torch.no_grad()
    def _score(self) -> int:
        ids = self._ids(self.rows)
        float(self.model(input_ids=ids, labels=ids, use_cache=False).loss)
        return ids.numel()


def main(
    model: Model = "qwen3-0.6b",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens in each prompt.")] = 128,
    new: Annotated[int, typer.Option(min=2, help="New tokens of each row, in each turn of the chat.")] = 128,
    turns: Annotated[int, typer.Option(min=1, help="Turns of the chat.")] = 10,
    beams: Annotated[int, typer.Option(min=2, help="Beams of the beam search.")] = 4,
    drafted: Annotated[int, typer.Option(min=1, help="Tokens in each draft.")] = 5,
    rows: Annotated[int, typer.Option(min=1, help="Rows scored at once.")] = 8,
    contenders: Contenders = "hf-eager,ours",
    runs: Annotated[int, typer.Option(min=1, help="Timed runs, after one that is not.")] = 3,
    device: DeviceName = "auto",
    json: Json = None,
    commit: Commit = None,
) -> None:
    """Measure beam search, drafts, prompt lookup, a chat and scoring, with HuggingFace and with this package."""
    largest = Workload(max(beams, rows), turns * (prompt + new), new)
    with bench(model, device, [largest], json, commit) as run:
        setup = run.setup
        setup.model()  # before it is copied
        drafts = replace(setup, _model=copy.deepcopy(setup.model()))

        def seconds(task: Callable[[], int]) -> float:
            setup.synchronize()
            start = time.perf_counter()
            task()
            setup.synchronize()
            return time.perf_counter() - start

        def measure(contender: Contender) -> None:
            with contender.opened(setup) as session, contender.opened(drafts) as drafting:
                settings = drafting.model.generation_config
                settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = drafted, "constant"
                settings.assistant_confidence_threshold = 0.0
                for one in (session.model, drafting.model):
                    if hasattr(one, "compiled"):
                        one.compiled.warmup([1, beams])  # which of them is needed depends on the drafts
                tasks = Tasks(session.model, drafting.model, prompt, new, turns, beams, drafted, rows)
                for name, task in tasks.all().items():
                    setup.log(f"{contender.name}, {name}")
                    torch.manual_seed(0)
                    tokens, times = task(), [seconds(task) for _ in range(runs)]
                    rate = Spread.of_rates(tokens / one for one in times)._asdict()
                    result = {"contender": contender.name, "task": name, "tokens": tokens, "seconds": times}
                    run.add("beams_and_drafts", {**result, "figures": {"tokens_per_s": rate}})

        run.each(ours.choose(contenders, setup.device.type), measure)


if __name__ == "__main__":
    typer.run(main)
