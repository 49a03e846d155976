"""Steps that draft: `compiled_llm/execution/drafts/costs.py`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

import compiled_llm
from compiled_llm.compilation.drafts import NEW_TOKENS
from compiled_llm.execution.drafts.costs import Costs
from compiled_llm.execution.drafts.part import MOST_DRAFTS, DraftSettings
from compiled_llm.execution.drafts.rounds import Rounds
from compiled_llm.execution.drafts.rule import Rule
from compiled_llm.kvcache.row import Row
from fitting.cases import HEAD_DIM, MODELS, VOCABULARY, Case, Fit, Machine

LAYERS = {"0.6B": 28, "8B": 36}
ROWS, SIZES = (1, 8, 32, 256), (1, *NEW_TOKENS)
PROMPT, STEPS, TURNS = 128, 20, 2
"""Tokens of a prompt, and timed steps, so many times, of which the best counts."""
WARM, CAPTURES = 4, 3
"""Steps before, that compile and miss a CUDA graph, which is captured then; so many times, more than a step has."""


def expected(share: float, size: int) -> float:
    """How many of ``size`` tokens count if each draft is right with this probability."""
    return sum(share**place for place in range(size))


def draft_cases(_: Machine, quick: bool) -> Iterator[Case]:
    """How many tokens a row feeds in, by how often drafts are right; times are those of a token that counts."""
    for model, (hidden, query, kv, intermediate) in MODELS.items():
        costs = Costs(2 * LAYERS[model] * hidden * (2 * query + 2 * kv + 3 * intermediate), on_cuda=True)
        for rows in ROWS:
            for share in (0.8,) if quick else (0.2, 0.5, 0.8):
                chosen = max(SIZES, key=lambda size: expected(share, size) / costs.of(size, rows))
                prepare = lambda given=(model, rows, share): draft_timer(*given)  # noqa: E731
                sizes = {f"q={size}": size for size in SIZES}
                yield Case("drafts", name_of(model, rows, share), sizes, f"q={chosen}", prepare)


def name_of(model: str, rows: int, share: float) -> str:
    return f"{model}, B={rows}, right {share}"


def draft_timer(model: str, rows: int, share: float) -> Callable[[int], float]:
    """What measures the microseconds of a token that counts, of each row."""
    return lambda size: step_time(model, rows, size) / expected(share, size)


@functools.cache
def step_time(model: str, rows: int, size: int) -> float:
    with torch.inference_mode(False):
        return steps_of(wrapped(model), rows, size)


@functools.lru_cache(maxsize=1)
def wrapped(name: str) -> Any:
    """Qwen3 with random weights, and pages for what is measured."""
    hidden, query, kv, intermediate = MODELS[name]
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=LAYERS[name],
        num_attention_heads=query // HEAD_DIM,
        num_key_value_heads=kv // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=40_960,
        tie_word_embeddings=name == "0.6B",
    )
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(pad_token_id=0)
    tokens = max(ROWS) * (PROMPT + longest_answer() + 32)
    return compiled_llm.wrap(model.eval(), max_batch_size=max(ROWS), kv_memory=f"{tokens} tokens", progress=False)


def longest_answer() -> int:
    """Tokens that a row may get while it is measured."""
    return SIZES[-1] * (WARM * CAPTURES + TURNS * STEPS + 4)


class Always(Rule):
    """Feeds in the same number of tokens each time, and counts the steps."""

    def __init__(self, size: int) -> None:
        self._size, self.steps = size, 0

    def size(self, rows: Sequence[Row]) -> int:
        self.steps += 1
        return self._size

    def limit(self, row: Row) -> int:
        return MOST_DRAFTS

    def note(self, *_: object) -> None:
        pass


def steps_of(model: Any, rows: int, size: int) -> float:
    """Microseconds of a step of ``size`` tokens of each row, as `generate` makes it, the host's part included."""
    loop, vocabulary = model.compiled.generate_loop(), model.config.vocab_size
    prompts = [np.arange(row, row + PROMPT) % (vocabulary - 1) + 1 for row in range(rows)]
    for prompt in prompts:
        loop.admit(prompt, longest_answer())
    rule = Always(size)
    rounds = Rounds(loop, DraftSettings(MOST_DRAFTS), prompts, longest_answer(), rule)
    try:
        for _ in range(CAPTURES):
            run(rounds, rule, WARM)
            loop.model_runner.graph_manager.cuda_graphs.finish()
        return min(run(rounds, rule, STEPS) for _ in range(TURNS))
    finally:
        loop.close()


def run(rounds: Rounds, rule: Always, steps: int) -> float:
    """Run so many steps, and return the microseconds of one."""
    # For its stream alone: while a graph is captured beside the steps, CUDA refuses to wait for the whole device.
    wait = torch.cuda.current_stream().synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began, end = time.perf_counter(), rule.steps + steps
    while rule.steps < end:
        rounds.next()
    wait()
    return (time.perf_counter() - began) / steps * 1e6


def constants_of(fits: Sequence[Fit]) -> str:
    """What was measured, as `costs.py` has it: for each model a step's cost in plain steps, by rows and q."""
    tables: dict[str, dict[int, Mapping[int, float]]] = {}
    for fit in fits:
        model, rows, share = (part.split(" ")[-1].removeprefix("B=") for part in fit.case.split(", "))
        steps = {size: fit.times[f"q={size}"] * expected(float(share), size) for size in SIZES}
        own = {size: round(steps[size] / steps[1], 2) for size in NEW_TOKENS}
        tables.setdefault(model, {})[int(rows)] = own
    lines = []
    for model, table in tables.items():
        entries = (f"    {rows}: {own}," for rows, own in table.items())
        lines += [f"{'_SMALL' if model == '0.6B' else '_LARGE'}: _Costs = {{", *entries, "}"]
    return "\n".join(lines)
