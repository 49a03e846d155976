"""Launches of what is scored of prompts, with all logits: those of one plan together, as many as fit."""

# A launch for each prompt would read all weights for the few tokens of a choice.
# Shapes: Q tokens of a launch, V vocabulary.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from compiled_llm.engine.logprobs.request_logprobs import RequestLogprobs
from compiled_llm.engine.logprobs.score_tokens import ScoredTokens, score_tokens
from compiled_llm.engine.steps.plan import RunsApart
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.engine.steps.taps import PlanTap
from compiled_llm.execution.batch import Extension
from compiled_llm.execution.decode.persistent_batch import PersistentBatch
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.staging import Readback
from compiled_llm.kvcache.row import Row

_LOGITS = 2**27
"""Numbers of ``[Q, V]`` logits in a launch of several prompts."""


class PromptWatch(PlanTap):
    """A watcher of a plan that knows whose prompts are scored."""

    prompts: Mapping[Row, RequestLogprobs]


class PromptLaunches(RunsApart):
    """What runs the chunks of all prompts that are scored."""

    timed = True  # they take about as long as others
    together = True

    def run(
        self,
        model_runner: ModelRunner,
        persistent: PersistentBatch,
        extensions: Sequence[Extension],
        taps: Sequence[PlanTap],
    ) -> Tensor:
        """Run them with all logits, without waiting for it; in the model's executor."""
        (watch,) = (tap for tap in taps if isinstance(tap, PromptWatch))
        persistent.invalidate_rows(_rows(extensions))
        most = _LOGITS // model_runner.vocabulary
        last = [_score(model_runner, some, taps, watch) for some in _groups(extensions, most)]
        ending = [extension for extension in extensions if extension.is_last]
        if not ending:
            return torch.zeros(0, dtype=torch.int64, device=model_runner.device)
        return model_runner.sample(_rows(ending), torch.cat(last), persistent, taps).tokens


PROMPTS = PromptLaunches()


def _score(
    model_runner: ModelRunner, extensions: Sequence[Extension], taps: Sequence[PlanTap], watch: PromptWatch
) -> Tensor:
    """Run a launch, have its tokens scored, and return ``[N, V]`` logits, of the last token of each that ends."""
    counts = [len(extension.ids) for extension in extensions]
    starts = [(watch.prompts[row], row.exact_length) for row in _rows(extensions)]
    parts = [_Scored(*start, count) for start, count in zip(starts, counts, strict=True)]
    logits = model_runner.extend(extensions, keep=np.arange(sum(counts)), taps=taps)  # [Q, V]
    lasts = np.cumsum(counts)[[extension.is_last for extension in extensions]] - 1
    following = np.concatenate([part.prompt.following(part.start, part.length) for part in parts])
    tokens, ending = model_runner.state.staging.to_device([following, lasts])
    most = max(part.prompt.prompt_most or 0 for part in parts)
    numbers = score_tokens(logits, tokens, min(most, logits.shape[1]))
    watch.add(ArrivingPrompts(parts, model_runner.readbacks.start_once(numbers)))
    return logits.index_select(0, ending)  # all of them would be kept


class _Scored(NamedTuple):
    """Tokens of a launch that one prompt has from ``start`` on."""

    prompt: RequestLogprobs
    start: int
    length: int


class ArrivingPrompts(NamedTuple):
    """Log-probabilities of what follows the tokens of a launch, on their way to the host."""

    parts: Sequence[_Scored]
    readback: Readback

    def hand_out(self) -> Mapping[Request, RequestError]:
        """Give each prompt its own; nothing of it follows its last token."""
        scored = ScoredTokens.unpacked(self.readback.array(), sum(part.length for part in self.parts))
        at = 0
        for prompt, start, length in self.parts:
            known = min(length, len(prompt.request.prompt) - 1 - start)
            prompt.score(start + 1, scored.of(at, at + known))
            at += length
        return {}


def _groups(extensions: Sequence[Extension], most: int) -> Iterator[list[Extension]]:
    """Yield those that run in one launch: ``most`` tokens, or one of them."""
    group: list[Extension] = []
    tokens = 0
    for extension in extensions:
        if group and tokens + len(extension.ids) > most:
            yield group
            group, tokens = [], 0
        group.append(extension)
        tokens += len(extension.ids)
    yield group


def _rows(extensions: Sequence[Extension]) -> list[Row]:
    return [cast(Row, extension.row) for extension in extensions]
