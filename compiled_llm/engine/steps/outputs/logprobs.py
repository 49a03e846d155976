"""Log-probabilities of tokens, computed next to a step and read with its tokens."""

from __future__ import annotations

import functools
import operator
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from compiled_llm.compilation.sampling.logprobs import SampledDraws, ScoredTokens, score_tokens
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.steps.scores import Scores, TokenScores
from compiled_llm.execution.batch import StepOutput, Tap
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.staging import Readback
from compiled_llm.kvcache.row import Row
from compiled_llm.requests.outputs import Logprob

T = TypeVar("T")
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Of what the model says, or of what tokens are drawn from: after penalties, biases, masks, temperature and filters."""


class _Entries(Sequence[T]):
    """Entries of consecutive tokens, made when they are read: millions would take seconds."""

    @abstractmethod
    def _entry(self, place: int) -> T:
        """Return the entry of one token."""

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        """Return a token's entries, by token id; of a slice, a list of them."""
        if isinstance(index, slice):
            return [self._entry(place) for place in range(*index.indices(len(self)))]
        return self._entry(range(len(self))[index])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} tokens>"


class Logprobs(_Entries[dict[int, Logprob]]):
    """Each token's entries: its own first, then the most likely ones."""

    def __init__(self, scores: Scores, tokens: Sequence[int], most: int, start: int = 0) -> None:
        """Refer to scores.

        Args:
            scores: of these tokens, or of fewer or more.
            tokens: from the one at ``start`` on.
            most: of how many of the most likely tokens.
            start: how many tokens before them have scores, too.
        """
        self._scores = scores
        self._tokens = list(tokens[: max(0, len(scores) - start)])
        self._most = most
        self._start = start

    def __len__(self) -> int:
        return len(self._tokens)

    def _entry(self, place: int) -> dict[int, Logprob]:
        return logprobs_of(self._scores[self._start + place], self._tokens[place], self._most)


class PromptLogprobs(_Entries[dict[int, Logprob] | None]):
    """The entries of a prompt's tokens; None in place of the first ones, which have none."""

    def __init__(self, scored: Logprobs, without: int) -> None:
        """``scored`` are the entries after the first ``without`` tokens."""
        self._scored, self._without = scored, without

    def __len__(self) -> int:
        return self._without + len(self._scored)

    def _entry(self, place: int) -> dict[int, Logprob] | None:
        return None if place < self._without else self._scored[place - self._without]


def logprobs_of(scores: TokenScores, token: int, most: int) -> dict[int, Logprob]:
    """Return the entries of one place: the sampled ``token`` first, then the ``most`` likely ones."""
    found = {token: Logprob(scores.sampled, scores.rank)}
    rank, before = 1, None
    for place, value in enumerate(scores.values[:most]):
        rank, before = (rank if value == before else place + 1), value
        found.setdefault(scores.tokens[place], Logprob(value, rank))
    return found


def token_logprobs(request: Request, tokens: Sequence[int], count: int = 0) -> Logprobs | None:
    """Return the entries of a request's ``tokens`` after the first ``count``; None if it does not want them."""
    return None if request.logprobs is None else Logprobs(request.scored, tokens, request.logprobs, count)


def prompt_logprobs(request: Request) -> PromptLogprobs | None:
    """Return the entries of a prompt's tokens, as far as computed; None if the request does not want them."""
    scored = scored_of(request)
    return None if scored is None else PromptLogprobs(scored, len(request.prompt[: request.scored_from]))


def scored_of(request: Request) -> Logprobs | None:
    """Return the entries of a prompt's tokens from ``scored_from`` on, as ``prompt_logprobs``."""
    if request.prompt_logprobs is None:
        return None
    return Logprobs(request.prompt_scored, request.prompt[request.scored_from :].tolist(), request.prompt_logprobs)


def prepare_logprobs(model_runner: ModelRunner) -> None:
    """Compile the kernels that compute them; no CUDA graph has these."""
    model_runner.thread.call(_score_nothing, model_runner)


def _score_nothing(model_runner: ModelRunner) -> None:
    state = model_runner.state
    logits = torch.zeros_like(state.slots.tables.counts[:1], dtype=state.dtype)
    score_tokens(logits, torch.zeros(1, dtype=torch.int64, device=logits.device), 1)


class Arriving(NamedTuple):
    """Log-probabilities of requests on their way to the host."""

    requests: Sequence[Request]
    readback: Readback

    def hand_out(self) -> None:
        """Give them to requests that have not ended; a token for one that has is dropped, too."""
        scored = ScoredTokens.unpacked(self.readback.array(), len(self.requests))
        packed = {most: scored.packed(most) for most in {request.logprobs or 0 for request in self.requests}}
        for row, request in enumerate(self.requests):
            if request.finish_reason is None:
                request.scored.append(packed[request.logprobs or 0][row])


class ArrivingPrompt(NamedTuple):
    """Log-probabilities of ``length`` tokens of a prompt, from ``start`` on, on their way to the host."""

    request: Request
    start: int
    length: int
    readback: Readback

    def hand_out(self) -> None:
        """Give the request those that it does not have: it may have begun again."""
        scored, known = ScoredTokens.unpacked(self.readback.array(), self.length), self.request.prompt_scored
        first = self.start - self.request.scored_from
        if first <= len(known):
            known.extend(scored.packed(self.request.prompt_logprobs or 0)[len(known) - first :])


class Watch(Tap):
    """Has log-probabilities computed in each step of one plan.

    Attributes:
        arriving: those on their way to the host.
    """

    def __init__(
        self, model_runner: ModelRunner, launches: Iterable[Sequence[Request]], mode: LogprobsMode = "raw_logprobs"
    ) -> None:
        """Find the requests that want them.

        Args:
            model_runner: runs the plan.
            launches: of each launch of the plan, the requests that it samples tokens for, in this order.
            mode: of which distribution.
        """
        self._model_runner = model_runner
        self._groups: dict[Row, _Group] = {}
        for requests in _observed_together(launches):
            if at := [at for at, request in enumerate(requests) if request.logprobs is not None]:
                self._groups[requests[0].running_row] = _Group(requests, at, mode)
        self.arriving: list[Arriving | ArrivingPrompt] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    def sampled(self, step: StepOutput) -> None:
        """Compute what is wanted of a launch; in the model's executor."""
        group = self._groups.get(step.rows[0])
        if group is not None and step.logits is not None:
            numbers = group.compute(self._model_runner, step)
            self.arriving.append(Arriving(group.requests, self._model_runner.readbacks.start(numbers)))

    def add(self, arriving: ArrivingPrompt) -> None:
        self.arriving.append(arriving)

    def taken(self) -> list[Arriving | ArrivingPrompt]:
        """Return what was computed since the last call."""
        arriving, self.arriving = self.arriving, []
        return arriving


def _observed_together(launches: Iterable[Sequence[Request]]) -> Iterator[Sequence[Request]]:
    """Yield the requests of each launch: first those whose tokens it samples, then those whose sampling is deferred."""
    for requests in launches:
        kinds = [request.sampling is not None and request.sampling.deferred for request in requests]
        if True not in kinds:
            yield requests
        else:
            yield [request for request, kind in zip(requests, kinds, strict=True) if not kind]
            yield [request for request, kind in zip(requests, kinds, strict=True) if kind]


class _Group:
    """The requests of one launch that want log-probabilities, ``at`` these places of it."""

    def __init__(self, all_of_them: Sequence[Request], at: Sequence[int], mode: LogprobsMode) -> None:
        self.requests = [all_of_them[place] for place in at]
        self._most = max(request.logprobs or 0 for request in self.requests)
        self._at = None if len(at) == len(all_of_them) else np.array(at, dtype=np.int64)
        self._kinds = _kinds(self.requests) if mode == "processed_logprobs" else None
        self._there: Tensor | None = None  # where on the device, once that has been uploaded

    def compute(self, model_runner: ModelRunner, step: StepOutput) -> Tensor:
        logits, tokens = step.logits if self._kinds is None or step.processed is None else step.processed, step.tokens
        assert logits is not None, "a step of one launch"
        if self._at is not None:
            if self._there is None:
                (self._there,) = model_runner.state.staging.to_device([self._at])
            logits, tokens = logits.index_select(0, self._there), tokens.index_select(0, self._there)
        draws = None if self._kinds is None else self._draws(model_runner, step.rows, self._kinds)
        return score_tokens(logits, tokens, min(self._most, logits.shape[1]), draws)

    def _draws(self, model_runner: ModelRunner, all_rows: Sequence[Row], kinds: int) -> SampledDraws:
        """Return how the rows were sampled: of each step, since slots and positions change."""
        state = model_runner.state
        rows = all_rows if self._at is None else [all_rows[place] for place in self._at]
        positions = np.array([row.position for row in rows], dtype=np.int64)
        slots, at = state.staging.to_device([state.slots.of(rows, len(rows)), positions])
        return SampledDraws(slots, at, state.slots.tables, kinds)


def _kinds(requests: Iterable[Request]) -> int | None:
    """Return the logit adjustments of all requests, or-ed together; None if all are greedy."""
    settings = [request.sampling for request in requests if request.sampling is not None]
    return functools.reduce(operator.or_, [sampling.adjustments for sampling in settings]) if settings else None
