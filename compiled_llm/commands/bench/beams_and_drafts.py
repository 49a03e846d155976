"""``bench beams-and-drafts``: beam search, drafts, a chat and scoring, HuggingFace's beside ours on the same weights.

Shapes: B rows, T prompt tokens.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compiled_llm.commands.bench.contender import Contender, Setup
from compiled_llm.commands.bench.experiment import Save, run_each
from compiled_llm.commands.bench.local import LocalSession
from compiled_llm.commands.bench.report import Report
from compiled_llm.commands.bench.results import Task
from compiled_llm.commands.bench.workload import Workload


@dataclass(frozen=True)
class Sizes:
    """How large the tasks are.

    Attributes:
        prompt: T.
        new: tokens generated for each row, in each turn of the chat.
        turns: of the chat.
        beams: of the beam search.
        drafted: tokens in each draft.
        rows: scored at once.
    """

    prompt: int = 128
    new: int = 128
    turns: int = 10
    beams: int = 4
    drafted: int = 5
    rows: int = 8

    def workload(self) -> Workload:
        """Return one that needs as many pages as the largest task."""
        return Workload(max(self.beams, self.rows), self.turns * (self.prompt + self.new), self.new)


class Tasks:
    """What is run; each method returns how many tokens it generated or scored."""

    def __init__(self, model: Any, draft: Any, sizes: Sizes) -> None:
        """Take a model, another of the same weights that drafts for it, and the sizes."""
        self._model, self._draft, self._sizes = model, draft, sizes
        draft.generation_config.num_assistant_tokens = sizes.drafted
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0

    def all(self) -> dict[str, Callable[[], int]]:
        """Return the tasks by name."""
        return {
            f"beam search, {self._sizes.beams} beams": self._beams,
            f"drafts of {self._sizes.drafted}, all of them right": self._drafts,
            f"prompt lookup, {self._sizes.drafted} tokens": self._lookup,
            f"chat of {self._sizes.turns} turns": self._chat,
            f"scoring, {self._sizes.rows} rows": self._score,
        }

    def _ids(self, rows: int, tokens: int) -> Tensor:
        vocabulary = self._model.config.get_text_config(decoder=True).vocab_size
        return torch.randint(1, vocabulary, (rows, tokens), device=self._model.device)

    def _generate(self, ids: Tensor, **options: Any) -> Any:
        mask = torch.ones_like(ids)
        options = {"max_new_tokens": self._sizes.new, "do_sample": False, **options}
        return self._model.generate(input_ids=ids, attention_mask=mask, **options)

    def _new(self, **options: Any) -> int:
        ids = self._ids(1, self._sizes.prompt)
        return int(self._generate(ids, **options).shape[1]) - self._sizes.prompt

    def _beams(self) -> int:
        return self._new(num_beams=self._sizes.beams)

    def _drafts(self) -> int:
        return self._new(assistant_model=self._draft)

    def _lookup(self) -> int:
        return self._new(prompt_lookup_num_tokens=self._sizes.drafted)

    def _chat(self) -> int:
        ids, cache = self._ids(1, self._sizes.prompt), None
        for _ in range(self._sizes.turns):
            out = self._generate(ids, past_key_values=cache, return_dict_in_generate=True)
            cache = out.past_key_values
            ids = torch.cat([out.sequences, self._ids(1, self._sizes.prompt)], dim=1)
        return self._sizes.turns * self._sizes.new

    @torch.no_grad()
    def _score(self) -> int:
        ids = self._ids(self._sizes.rows, self._sizes.prompt)
        float(self._model(input_ids=ids, labels=ids, use_cache=False).loss)
        return ids.numel()


def measure(
    contenders: Iterable[Contender],
    setup: Setup,
    sizes: Sizes,
    runs: int,
    report: Report,
    save: Save,
) -> None:
    """Run every task with one contender after the other, into the report.

    Args:
        contenders: who takes part, all of them in this process.
        setup: model, device, and the workload of ``sizes``.
        sizes: how large the tasks are.
        runs: timed runs of each task, after one that is not timed.
        report: gets results and failures.
        save: called after each result.
    """
    drafts = replace(setup, _model=copy.deepcopy(setup.model()))

    def measure_one(contender: Contender) -> None:
        with contender.opened(setup) as session, contender.opened(drafts) as drafting:
            assert isinstance(session, LocalSession)
            assert isinstance(drafting, LocalSession)
            _measure_one(contender.name, session, drafting, sizes, runs, report, save)

    run_each(contenders, setup, report, save, measure_one)


def _measure_one(
    name: str,
    session: LocalSession,
    drafting: LocalSession,
    sizes: Sizes,
    runs: int,
    report: Report,
    save: Save,
) -> None:
    for model in (session.model, drafting.model):
        if hasattr(model, "compiled"):
            model.compiled.warmup([1, sizes.beams])  # which of them a run needs depends on which drafts are accepted
    for task, run in Tasks(session.model, drafting.model, sizes).all().items():
        session.setup.log(f"{name}, {task}")
        torch.manual_seed(0)
        tokens = run()
        seconds = [_seconds(run, session.setup) for _ in range(runs)]
        report.beams_and_drafts.append(Task(name, task, tokens, seconds))
        save()


def _seconds(run: Callable[[], object], setup: Setup) -> float:
    setup.synchronize()
    start = time.perf_counter()
    run()
    setup.synchronize()
    return time.perf_counter() - start
