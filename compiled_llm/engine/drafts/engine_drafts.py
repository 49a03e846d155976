"""The guesses of one engine loop: how many tokens its steps check, and what has come of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from compiled_llm.compilation.drafts import Drafter
from compiled_llm.engine.draft_stats import DraftStats
from compiled_llm.engine.drafts.config import METHODS, SpeculativeConfig
from compiled_llm.engine.loop_settings import LoopSettings
from compiled_llm.engine.steps.plan import StepPlan
from compiled_llm.engine.steps.request import Request
from compiled_llm.execution.accepted import AcceptedTokens
from compiled_llm.execution.batch import Drafting
from compiled_llm.execution.drafts import texts
from compiled_llm.execution.drafts.part import Drafts, DraftSettings
from compiled_llm.execution.drafts.texts import Texts, texts_of
from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.execution.lifecycle.warmup import Report
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.kvcache.row import Row
from compiled_llm.model.sizes import max_positions_of

logger = logging.getLogger("compiled_llm.engine")

_MOST_GRAPHS = 12
"""CUDA graphs that are captured ahead, of the fewest rows; those of other steps are captured once they are wanted."""


class EngineDrafts:
    """The guesses of a loop's requests.

    Attributes:
        counts: of all steps that were read.
        max_positions: how many tokens a row may have, guesses among them.
    """

    def __init__(self, model_runner: ModelRunner, settings: LoopSettings) -> None:
        """Begin without any; ValueError if memory lacks for the texts to look in."""
        self._drafts = _drafts_of(settings.speculation, model_runner, self._text_of, heard=self._count)
        self._settings = settings
        self._requests: dict[Row, Request] = {}  # of the last plan
        # whom the rule was last asked about, with their rows, what it said, and in which step
        self._asked: Sequence[Request] = ()
        self._rows: Sequence[Row] = ()
        self._said = self._step = 0
        self.counts = DraftStats()
        longest = self._drafts.texts.longest_text
        self.max_positions = longest if settings.max_model_len is None else min(longest, settings.max_model_len)
        self._told = False

    def _text_of(self, row: Row) -> NDArray[np.int64]:
        return self._requests[row].text_ids

    def new_tokens(self, requests: Sequence[Request], step: int) -> int:
        """Return how many tokens each of these requests feeds in next; all but the first one are guesses."""
        # The rule counts steps, so it is asked once in each; it looks at rows again if they are another object.
        if step != self._step:
            if requests is not self._asked:
                self._asked, self._rows = requests, [request.running_row for request in requests]
            self._said, self._step = self._of_rule(requests), step
        return self._said

    def _of_rule(self, requests: Sequence[Request]) -> int:
        if all(request.constraint is not None for request in requests):  # the host decides each of their tokens
            return 1
        if any(map(self._needs_single_tokens, requests)):
            self._tell()
            return 1
        return self._drafts.rule.size(self._rows)

    def _needs_single_tokens(self, request: Request) -> bool:
        return any(part.needs_single_tokens(self._settings) for part in request.parts.values())

    def _tell(self) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "compiled_llm: speculative_config: no tokens are guessed while a request runs that wants hidden "
                "states, outputs of hooks, or processed_logprobs; submit it to an engine without speculative_config"
            )

    def drafting(self, plan: StepPlan) -> Drafting:
        """Return what makes the steps of a plan guess, and check what they have guessed."""
        self._requests = {request.running_row: request for request in plan.decode}
        return self._drafts.drafting(plan.new_tokens)

    def _count(self, accepted: AcceptedTokens) -> None:
        self.counts = self.counts.plus(DraftStats.of(accepted.offered, accepted.right, accepted.new_tokens - 1))


def _drafts_of(
    config: SpeculativeConfig,
    model_runner: ModelRunner,
    text_of: Callable[[Row], NDArray[np.int64]],
    heard: Callable[[AcceptedTokens], None],
) -> Drafts:
    settings = DraftSettings(config.num_speculative_tokens, config.prompt_lookup_max, config.prompt_lookup_min)
    drafter_of: Callable[[Texts], Drafter] = import_module(METHODS[config.method][0]).drafter_of
    return Drafts(model_runner, settings, text_of, drafter_of, config.method, heard=heard)


def check_memory(runtime: Runtime, rows: int) -> None:
    """Raise ValueError if memory lacks for the texts of so many rows, as far as that is known now."""
    lifecycle, model = runtime.runner_lifecycle, runtime.facts.model
    rows, present = max(rows, lifecycle.rows), lifecycle.present
    try:
        if present is not None and present.config.max_batch_size >= rows:
            texts_of(present)
        else:
            texts.check_memory(runtime.config, rows, max_positions_of(model), model.device)
    except ValueError as error:
        raise ValueError(f"speculative_config: {error}") from error


def prepare(model_runner: ModelRunner, config: SpeculativeConfig, rows: Iterable[int], report: Report) -> None:
    """Compile the steps that guess for so many rows, and on CUDA capture those of the fewest rows, while none runs."""

    def drafts_of(model_runner: ModelRunner) -> Drafts:
        return _drafts_of(config, model_runner, lambda row: np.zeros(0, dtype=np.int64), lambda accepted: None)

    steps, thread, drafts = model_runner.steps, model_runner.thread, drafts_of(model_runner)
    numbers = [number for number in drafts.sizes if number > 1]
    by_rows = [[drafts.key(steps.step_of_several(count, number)) for number in numbers] for count in sorted({*rows})]
    keys = [key for keys in by_rows for key in keys]
    chosen = [*keys[:_MOST_GRAPHS], *keys[-len(numbers) :]]
    if model_runner.graph_manager.eager and (compiling := model_runner.compiling) is not None:
        compiling.begin(chosen, needs=drafts_of)  # or the first trial after it has taken over would wait for them
    for key in chosen:
        if not steps.is_ready(key):
            report(f"preparing steps of {key.rows} requests with {key.new_tokens_per_row} tokens each")
            if key in keys[:_MOST_GRAPHS]:
                thread.call(steps.ready, key)
            else:
                thread.call(steps.compile, key)
