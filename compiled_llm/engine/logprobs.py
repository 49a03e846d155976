"""Log-probabilities that requests want of their tokens: computed beside a step, and read with its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from compiled_llm.compilation.logprobs import Filters, ScoredTokens, neutral, score_tokens
from compiled_llm.compilation.sampling import Sampling
from compiled_llm.engine.output import Logprob
from compiled_llm.engine.request import Request
from compiled_llm.execution.batch import Step
from compiled_llm.execution.device_model import DeviceModel
from compiled_llm.execution.staging import Readback
from compiled_llm.kvcache.row import Row

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
"""Of what the model says, or of what tokens are drawn from: after temperature, top-k, top-p and min-p."""


class Logprobs(Sequence[dict[int, Logprob]]):
    """The entries of some tokens, one after the other, made when they are looked at: millions would take seconds.

    Each has its own token's first, then those of the likeliest ones.
    """

    def __init__(self, places: Sequence[tuple[ScoredTokens, int]], tokens: Sequence[int], most: int) -> None:
        """Keep where they are.

        Args:
            places: of each token, and in which row.
            tokens: that stand there, or more.
            most: of how many of the likeliest tokens.
        """
        self._places = list(zip(places, tokens, strict=False))
        self._most = most

    def __len__(self) -> int:
        """Of how many tokens they are."""
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob]]: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob]]:
        """Return a token's entries, by token id; of a slice, a list of them."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        (scored, row), token = self._places[index]
        return logprobs_of(scored, row, token, self._most)

    def __repr__(self) -> str:
        """Of how many tokens they are."""
        return f"<{type(self).__name__} of {len(self)} tokens>"

    @property
    def cumulative(self) -> float:
        """The sum over the tokens."""
        return sum((float(scored.chosen[row]) for (scored, row), _ in self._places), 0.0)


def logprobs_of(scored: ScoredTokens, row: int, token: int, most: int) -> dict[int, Logprob]:
    """Return the entries of one place: the token that stands there first, then the ``most`` likeliest ones.

    Args:
        scored: of several places.
        row: which of them.
        token: that was chosen.
        most: how many others, at most as many as ``scored`` has.
    """
    found = {token: Logprob(float(scored.chosen[row]), int(scored.ranks[row]))}
    others, values = scored.tokens[row, :most].tolist(), scored.values[row, :most].tolist()
    rank, before = 1, None
    for place, value in enumerate(values):
        rank, before = (rank if value == before else place + 1), value
        found.setdefault(others[place], Logprob(value, rank))
    return found


def token_logprobs(request: Request, tokens: Sequence[int]) -> Logprobs | None:
    """Return the entries of each of a request's first tokens; None if it does not want them."""
    return None if request.logprobs is None else Logprobs(request.scored, tokens, request.logprobs)


def prompt_logprobs(request: Request) -> list[dict[int, Logprob] | None] | None:
    """Return the entries of each of a prompt's tokens, as far as they were computed; None if nobody wants them."""
    if request.prompt_logprobs is None:
        return None
    return [None, *Logprobs(request.prompt_scored, request.prompt[1:].tolist(), request.prompt_logprobs)]


def check_mode(mode: LogprobsMode, requests: Iterable[Request]) -> None:
    """Check that log-probabilities can be computed as ``mode`` says.

    Raises:
        ValueError: what tokens are drawn from depends on settings that have changed once a token is chosen.
    """
    if mode == "raw_logprobs":
        return
    if any(request.logprobs is not None and request.sampling and request.sampling.edits for request in requests):
        raise ValueError(
            "logprobs: with logprobs_mode='processed_logprobs' they cover temperature, top_k, top_p and min_p, and "
            "this request has penalties, biases or barred tokens; leave those out, or make the engine with "
            "'raw_logprobs'"
        )


def prepare_logprobs(device_model: DeviceModel) -> None:
    """Have the kernels compiled that compute them; no recording has these."""
    device_model.thread.call(_score_nothing, device_model)


def _score_nothing(device_model: DeviceModel) -> None:
    state = device_model.state
    logits = torch.zeros_like(state.slots.tables.counts[:1], dtype=state.pages[0].dtype)
    score_tokens(logits, torch.zeros(1, dtype=torch.int64, device=logits.device), 1)


class Arriving(NamedTuple):
    """Log-probabilities on their way to the host.

    Attributes:
        requests: whose they are.
        readback: the numbers.
    """

    requests: Sequence[Request]
    readback: Readback

    def hand_out(self) -> None:
        """Give them to requests that have not ended; a token that comes for one that has is dropped, too."""
        scored = ScoredTokens.unpacked(self.readback.array(), len(self.requests))
        for row, request in enumerate(self.requests):
            if not request.done:
                request.scored.append((scored, row))


class ArrivingPrompt(NamedTuple):
    """Log-probabilities of a chunk of a prompt, on their way to the host.

    Attributes:
        request: whose they are.
        start: how many tokens of the prompt stand before the chunk.
        length: of how many tokens they are.
        readback: the numbers.
    """

    request: Request
    start: int
    length: int
    readback: Readback

    def hand_out(self) -> None:
        """Give them to the request, those that it does not have: it may have begun again."""
        scored, known = ScoredTokens.unpacked(self.readback.array(), self.length), self.request.prompt_scored
        if self.start <= len(known):
            known += [(scored, row) for row in range(len(known) - self.start, self.length)]


class Watch:
    """Has log-probabilities computed in each step of one plan."""

    def __init__(
        self, device_model: DeviceModel, launches: Iterable[Sequence[Request]], mode: LogprobsMode = "raw_logprobs"
    ) -> None:
        """Look who wants them.

        Args:
            device_model: what runs the plan.
            launches: of each launch of the plan, the requests that it chooses tokens for, in this order.
            mode: of which distribution.
        """
        self._device_model = device_model
        self._groups: dict[Row, _Group] = {}
        for requests in _observed_together(launches):
            if at := [at for at, request in enumerate(requests) if request.logprobs is not None]:
                self._groups[requests[0].running_row] = _Group(requests, at, mode)
        self._arriving: list[Arriving | ArrivingPrompt] = []

    def __bool__(self) -> bool:
        """Whether anybody wants them."""
        return bool(self._groups)

    def see(self, step: Step) -> None:
        """Compute what is wanted of a launch; in the model's executor."""
        group = self._groups.get(step.rows[0])
        if group is not None and step.logits is not None:
            numbers = group.compute(self._device_model, step.logits, step.tokens)
            self._arriving.append(Arriving(group.requests, self._device_model.readbacks.start(numbers)))

    def add(self, arriving: ArrivingPrompt) -> None:
        """Have something else read with the step's tokens."""
        self._arriving.append(arriving)

    def taken(self) -> list[Arriving | ArrivingPrompt]:
        """Return what has been computed since it was last asked for."""
        arriving, self._arriving = self._arriving, []
        return arriving


def _observed_together(launches: Iterable[Sequence[Request]]) -> Iterator[Sequence[Request]]:
    """Yield the requests of each launch: first those whose tokens it chooses, then those whose choice is deferred."""
    for requests in launches:
        kinds = [request.sampling is not None and request.sampling.deferred for request in requests]
        if True not in kinds:
            yield requests
        else:
            yield [request for request, kind in zip(requests, kinds, strict=True) if not kind]
            yield [request for request, kind in zip(requests, kinds, strict=True) if kind]


class _Group:
    """The requests of one launch that want log-probabilities.

    Attributes:
        requests: who wants them.
    """

    def __init__(self, all_of_them: Sequence[Request], at: Sequence[int], mode: LogprobsMode) -> None:
        """Look what they want who are ``at`` these places of the launch."""
        self.requests = [all_of_them[place] for place in at]
        self._most = max(request.logprobs or 0 for request in self.requests)
        self._at = None if len(at) == len(all_of_them) else np.array(at, dtype=np.int64)
        self._filtered = mode == "processed_logprobs" and any(_filters(request.sampling) for request in self.requests)
        self._there: Tensor | None = None  # where on the device, once that has been uploaded
        self._filters: Filters | None = None

    def compute(self, device_model: DeviceModel, logits: Tensor, tokens: Tensor) -> Tensor:
        if self._at is not None:
            if self._there is None:
                (self._there,) = device_model.state.staging.to_device([self._at])
            logits, tokens = logits.index_select(0, self._there), tokens.index_select(0, self._there)
        if self._filtered and self._filters is None:
            self._filters = self._uploaded(device_model, logits.shape[1])
        return score_tokens(logits, tokens, min(self._most, logits.shape[1]), self._filters)

    def _uploaded(self, device_model: DeviceModel, vocabulary: int) -> Filters:
        each = [neutral(vocabulary) | _filters(request.sampling) for request in self.requests]
        columns = [
            np.array([filters[name] for filters in each], dtype=np.int64 if name == "top_k" else np.float32)
            for name in Filters._fields
        ]
        return Filters(*device_model.state.staging.to_device(columns))


def _filters(sampling: Sampling | None) -> dict[str, float]:
    """Return what a row leaves out of its distribution; nothing if it takes the likeliest token."""
    if sampling is None or sampling.temperature == 0:
        return {}
    set_ones = {name: getattr(sampling, name) for name in Filters._fields}
    return {name: value for name, value in set_ones.items() if not (name == "top_k" and value == 0)}
