"""Beam search, drafts, a chat and scoring: the wrapped model against HuggingFace's, on the same weights in one run.

``python -m compiled_llm.commands.bench.beams_and_drafts --model qwen3-0.6b`` prints a table;
``--json`` writes the figures.

Shapes: B rows, T prompt tokens.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import compiled_llm
from compiled_llm.commands.bench import models
from compiled_llm.commands.bench.contender import free_memory


@dataclass(frozen=True)
class Sizes:
    """How much of everything.

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


@dataclass(frozen=True)
class Measured:
    """One mode of one contender.

    Attributes:
        mode: what was asked for.
        contender: ``huggingface`` or ``compiled-llm``.
        tokens: given out, or scored, in one run.
        seconds: of each run, warm.
    """

    mode: str
    contender: str
    tokens: int
    seconds: list[float]

    @property
    def rate(self) -> float:
        """Tokens a second in the median run."""
        return self.tokens / statistics.median(self.seconds)


class Modes:
    """What is run; each method returns how many tokens it gave out or scored."""

    def __init__(self, model: Any, draft: Any, sizes: Sizes) -> None:
        """Take a model, another of the same weights that drafts for it, and the sizes."""
        self._model, self._draft, self._sizes = model, draft, sizes
        draft.generation_config.num_assistant_tokens = sizes.drafted
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0

    def all(self) -> dict[str, Callable[[], int]]:
        """Return the modes by name."""
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
    name: str, device: torch.device, dtype: torch.dtype, sizes: Sizes, runs: int, **options: Any
) -> list[Measured]:
    """Run every mode on the unwrapped and then on the wrapped model.

    Args:
        name: a model that ``compiled-llm bench`` knows.
        device: where it runs.
        dtype: of its weights.
        sizes: how much of everything.
        runs: how often each mode is timed, after one run that is not.
        options: those of ``wrap``.
    """
    model = models.build(name, device, dtype)
    draft = copy.deepcopy(model)
    found = _timed("huggingface", Modes(model, draft, sizes), device, runs)
    tokens = 2 * sizes.turns * (sizes.prompt + sizes.new) + sizes.rows * sizes.prompt
    for each in (model, draft):
        compiled_llm.wrap(each, kv_memory=f"{sizes.beams * tokens} tokens", progress=False, **options)
        cast(Any, each).compiled.warmup([1, sizes.beams])  # which of them a run needs depends on what is accepted
    found += _timed("compiled-llm", Modes(model, draft, sizes), device, runs)
    return found


def _timed(contender: str, modes: Modes, device: torch.device, runs: int) -> list[Measured]:
    found = []
    for mode, run in modes.all().items():
        torch.manual_seed(0)
        tokens, seconds = run(), []
        for _ in range(runs):
            _synchronize(device)
            start = time.perf_counter()
            run()
            _synchronize(device)
            seconds.append(time.perf_counter() - start)
        found.append(Measured(mode, contender, tokens, seconds))
        free_memory(device)
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(found: Sequence[Measured]) -> Table:
    """Return tokens a second, one line a mode."""
    rates = {(each.mode, each.contender): each.rate for each in found}
    lines = Table("mode", "HuggingFace", "compiled-llm", "", title="tokens a second, median")
    for mode in dict.fromkeys(each.mode for each in found):
        theirs, ours = rates[mode, "huggingface"], rates[mode, "compiled-llm"]
        lines.add_row(mode, f"{theirs:,.0f}", f"{ours:,.0f}", f"{ours / theirs:.1f}x")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b" if cuda else "tiny")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--mode", default="cuda-graphs", help="of wrap")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    for field, default in asdict(Sizes()).items():
        parser.add_argument(f"--{field}", type=int, default=default)
    given = parser.parse_args(arguments)
    sizes = Sizes(**{field: getattr(given, field) for field in asdict(Sizes())})
    device = torch.device(given.device)
    found = measure(given.model, device, getattr(torch, given.dtype), sizes, given.runs, mode=given.mode)
    Console().print(table(found))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=2))


if __name__ == "__main__":
    main()
