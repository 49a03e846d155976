"""Log-probabilities of tokens, computed next to a step and read with its tokens."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN
from compiled_llm.engine.logprobs.prompt_launches import PROMPTS, PromptWatch
from compiled_llm.engine.logprobs.request_logprobs import RequestLogprobs
from compiled_llm.engine.logprobs.score_tokens import SampledDraws, ScoredTokens, score_tokens
from compiled_llm.engine.steps.plan import StepPlan
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.engine.steps.taps import EngineTap, PlanTap
from compiled_llm.execution.batch import StepOutput
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.staging import Readback
from compiled_llm.kvcache.row import Row
from compiled_llm_ops.sampling.adjustments import Noted

if TYPE_CHECKING:
    from compiled_llm.engine.logprobs import tap as this
    from compiled_llm.engine.steps.taps import TapPart

    checked: TapPart = this

NAME = "logprobs"
"""By which a request has its ``RequestLogprobs``."""


class LogprobsTap(EngineTap):
    """The log-probabilities of a loop's requests."""

    @staticmethod
    def asked(**asked: Any) -> Callable[[Request], None]:
        """``params`` say of how many tokens."""

        def enter(request: Request) -> None:
            request.parts[NAME] = RequestLogprobs(request, asked["params"], PROMPTS)

        return enter

    @staticmethod
    def prepare(model_runner: ModelRunner) -> None:
        """Compile the kernels that compute them; no CUDA graph has these."""
        model_runner.thread.call(_score_nothing, model_runner)

    def of_plan(self, plan: StepPlan) -> PlanTap | None:
        both = ((request, request.part(NAME)) for request in plan.sampled)
        wanting = [request for request, part in both if part is not None and part.most is not None]
        scored = [chunk.request for chunk in plan.extend if chunk.apart is PROMPTS]
        if not (wanting or scored):
            return None
        return Watch(self.model_runner, wanting, scored, self.settings.logprobs_mode == "processed_logprobs")


TAP: type[EngineTap] = LogprobsTap


def _score_nothing(model_runner: ModelRunner) -> None:
    state = model_runner.state
    logits = torch.zeros_like(state.slots.tables.counts[:1], dtype=state.dtype)
    score_tokens(logits, torch.zeros(1, dtype=torch.int64, device=logits.device), 1)


class ArrivingLogprobs(NamedTuple):
    """Log-probabilities of requests on their way to the host, of ``each`` tokens a request."""

    requests: Sequence[Request]
    readback: Readback
    each: int = 1

    def hand_out(self) -> Mapping[Request, RequestError]:
        """Give them to requests that have not ended; a token for one that has is dropped, too."""
        scored = ScoredTokens.unpacked(self.readback.array(), len(self.requests) * self.each)
        parts = [request.part(NAME) for request in self.requests]
        packed = {most: scored.packed(most) for most in {part.most or 0 for part in parts}}
        counts = scored.ranks.reshape(-1, self.each).astype(bool).sum(axis=1).tolist() if self.each > 1 else None
        for place, (request, part) in enumerate(zip(self.requests, parts, strict=True)):
            if request.finish_reason is None:
                first, count = place * self.each, 1 if counts is None else counts[place]
                part.scored.extend(packed[part.most or 0][first : first + count])
        return {}


class Watch(PromptWatch):
    """A tap that has log-probabilities computed in each step of one plan."""

    def __init__(
        self, model_runner: ModelRunner, requests: Iterable[Request], scored: Iterable[Request], processed: bool
    ) -> None:
        """``requests`` want them, of what tokens are sampled from if ``processed``; some prompts are ``scored``."""
        super().__init__()
        self._model_runner, self._processed = model_runner, processed
        self._requests = {request.running_row: request for request in requests}
        self.prompts = {request.running_row: request.part(NAME) for request in scored}
        self._groups: dict[Row, tuple[Sequence[Row], list[_Group]]] = {}  # by the first row of a launch, with all rows

    def sampling(self, rows: Sequence[Row]) -> None:
        if self._processed:
            for group in self._groups_of(rows):
                group.copy_noted(self._model_runner)

    def sampled(self, step: StepOutput) -> None:
        if step.logits is None:
            return
        for group in self._groups_of(step.rows):
            numbers, each = group.compute(self._model_runner, step), len(step.tokens) // len(step.rows)
            self._arriving.append(ArrivingLogprobs(group.requests, self._model_runner.readbacks.start(numbers), each))

    def _groups_of(self, rows: Sequence[Row]) -> list[_Group]:
        """Return who wants those of the most likely tokens, and who names tokens; no group is empty."""
        known, groups = self._groups.get(rows[0], ((), []))
        if known != rows:
            names, most_likely = dict[Row, Request](), dict[Row, Request]()
            for row in rows:
                if (request := self._requests.get(row)) is not None:
                    (most_likely if request.part(NAME).named is None else names)[row] = request
            groups = [_Group(rows, wanting, self._processed) for wanting in (most_likely, names) if wanting]
            self._groups[rows[0]] = rows, groups
        return groups


class _Group:
    """The requests of one launch that want log-probabilities, of the most likely tokens or of those that they name."""

    def __init__(self, rows: Sequence[Row], wanting: Mapping[Row, Request], processed: bool) -> None:
        """At least one row is ``wanting``."""
        self.rows = rows
        self.requests = list(wanting.values())
        parts = [request.part(NAME) for request in self.requests]
        self._most: int = max(part.most for part in parts)
        self._named = _padded([part.named or () for part in parts], self._most)
        at = [place for place, row in enumerate(rows) if row in wanting]
        self._at = None if len(at) == len(rows) else np.array(at, dtype=np.int64)
        self._kinds = _kinds(self.requests) if processed else None
        self._noted: Noted | None = None  # by the requests' rows, before the tokens of the step that is under way
        self._there: Tensor | None = None  # on the device, once they have been uploaded
        self._names: Tensor | None = None  # ``[R * K]`` int64, likewise

    def copy_noted(self, model_runner: ModelRunner) -> None:
        """Copy what the requests' rows have noted before their next tokens, if logits are adjusted; without waiting."""
        if self._kinds:
            state = model_runner.state
            (slots,) = state.staging.to_device([state.slots.of(self._own(self.rows), len(self.requests))])
            self._noted = Noted.of(state.slots.tables, slots)

    def compute(self, model_runner: ModelRunner, step: StepOutput) -> Tensor:
        logits, tokens = step.logits if self._kinds is None or step.processed is None else step.processed, step.tokens
        assert logits is not None, "a step of one launch"
        if self._at is not None:
            if self._there is None:
                (self._there,) = model_runner.state.staging.to_device([self._at])
            logits, tokens = (_of_rows(own, self._there, len(self.rows)) for own in (logits, tokens))
        draws = None if self._kinds is None else self._draws(model_runner, step.rows, self._kinds)
        numbers = score_tokens(logits, tokens, self._others(model_runner, logits, len(tokens)), draws)
        if len(tokens) > len(self.requests):  # what does not count of several tokens a row gets a rank of 0
            numbers.view(len(tokens), -1)[:, 1].masked_fill_(tokens < NOT_A_TOKEN, 0)
        return numbers

    def _others(self, model_runner: ModelRunner, logits: Tensor, tokens: int) -> int | Tensor:
        """Return of how many other tokens there are to be log-probabilities, or of which, with each of ``tokens``."""
        if not self._named.size:
            return min(self._most, logits.shape[1])
        if self._names is None:
            (self._names,) = model_runner.state.staging.to_device([self._named.ravel()])
        names: Tensor = self._names.view(self._named.shape)
        each: Tensor = names.repeat_interleave(tokens // len(names), dim=0)
        return each

    def _own(self, all_rows: Sequence[Row]) -> Sequence[Row]:
        return all_rows if self._at is None else [all_rows[place] for place in self._at]

    def _draws(self, model_runner: ModelRunner, all_rows: Sequence[Row], kinds: int) -> SampledDraws:
        """Return how the rows were sampled: of each step, since slots and positions change."""
        state, rows = model_runner.state, self._own(all_rows)
        noted, self._noted = self._noted, None
        positions = np.array([row.exact_position for row in rows], dtype=np.int64)
        slots, at = state.staging.to_device([state.slots.of(rows, len(rows)), positions])
        return SampledDraws(slots, at, state.slots.tables, kinds, noted)


def _padded(named: Sequence[Sequence[int]], most: int) -> NDArray[np.int64]:
    """Return the tokens that each request names as ``[R, K]``, -1 after its last; empty if none names any."""
    if not any(named):
        return np.zeros(0, dtype=np.int64)
    return np.array([[*tokens, *(-1 for _ in range(most - len(tokens)))] for tokens in named], dtype=np.int64)


def _of_rows(tensor: Tensor, there: Tensor, count: int) -> Tensor:
    """Return what some of ``count`` rows have of a tensor, in which all have equally many entries."""
    if len(tensor) == count:
        return tensor.index_select(0, there)
    several: Tensor = tensor.unflatten(0, (count, -1))
    return several.index_select(0, there).flatten(0, 1)


def _kinds(requests: Iterable[Request]) -> int | None:
    """Return the logit adjustments of all requests, or-ed together; None if all are greedy."""
    settings = [request.sampling for request in requests if request.sampling is not None]
    return functools.reduce(operator.or_, [sampling.adjustments for sampling in settings]) if settings else None
