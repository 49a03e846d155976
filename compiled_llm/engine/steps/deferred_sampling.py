"""Samples those tokens of a step for which the host first has to read the previous ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_llm.compilation.sampling.sampling import NOT_A_TOKEN
from compiled_llm.engine.steps.constraint import Constraint
from compiled_llm.engine.steps.processors import processed_logits
from compiled_llm.engine.steps.request import InvalidRequestError, Request, RequestError
from compiled_llm.engine.steps.taps import PlanTap, UnreadOutput
from compiled_llm.execution.decode.deferred_sampling import Masks
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.pipeline import Pipeline
from compiled_llm.execution.state.staging import Readback, Staging
from compiled_llm.kvcache.row import Row


class _Member(NamedTuple):
    """A request with a constraint, and its place among those that the step samples tokens for."""

    place: int
    request: Request
    row: Row
    constraint: Constraint


class Constrained:
    """The requests of a plan that have constraints, looked at once for all steps of the plan."""

    def __init__(self, members: list[_Member]) -> None:
        self.members = members  # in the plan's order
        self.forms = [form for each in members if (form := each.constraint.form) is not None]
        # those whose tokens have masks; first those with ``forms``
        masked = [each for each in members if each.constraint.masked]
        self.masked = sorted(masked, key=lambda each: each.constraint.form is None)
        self.rows = [each.row for each in self.masked]
        self.masks = [_mask_of(each.request) for each in self.masked]  # that these came in with
        self.matchers = [form.matcher for form in self.forms]
        # places in ``masked`` of those whose settings may bar more
        self.narrowed = [at for at, each in enumerate(self.masked) if _may_bar_more(each.constraint)]
        self.processed = [each for each in members if each.constraint.processors]  # those with logits processors
        self.plain = all(each.constraint.plain for each in members)

    @classmethod
    def among(cls, requests: Sequence[Request]) -> Constrained | None:
        """Return the constrained ones of a step's requests, which all have rows; None if there are none."""
        members = [
            _Member(place, request, request.running_row, request.constraint)
            for place, request in enumerate(requests)
            if request.constraint is not None
        ]
        return cls(members) if members else None

    @property
    def writer(self) -> Any:
        return self.forms[0].writer

    def present(self) -> Constrained:
        """Return those that have not ended."""
        running = [each.request.finish_reason is None for each in self.members]
        return self if all(running) else Constrained(list(itertools.compress(self.members, running)))


class LateSampling:
    """The requests of one step whose tokens are sampled late."""

    def __init__(self, requests: Constrained, taps: Sequence[PlanTap]) -> None:
        self._requests = requests
        self._taps = taps
        self._masks: Masks | None = None
        self._processed: dict[Request, Tensor] | None = None  # logits
        self._nan: Readback | None = None  # of each edited request, whether there is NaN in its logits
        self._arriving: list[UnreadOutput] = []
        self.failed: dict[Request, RequestError] = {}  # errors that end single requests; their tokens are not read

    def sample(self, model_runner: ModelRunner, pipeline: Pipeline[Any]) -> None:
        """Sample the tokens of the pipeline's newest step, all earlier ones having been read, and wait for nothing."""
        # After a failure, what was done before it is not repeated.
        present = self._requests.present()
        masks = self._masks = _masks(present, model_runner.state.staging) if present.masked else None
        if self._processed is None:
            self._processed = self._edit(model_runner, pipeline, present.processed)
        model_runner.thread.call(self._sample, model_runner, pipeline, masks)

    def _sample(self, model_runner: ModelRunner, pipeline: Pipeline[Any], masks: Masks | None) -> None:
        logits = self._processed or {}
        processed = {each.row: logits[each.request] for each in self._requests.processed if each.request in logits}
        if processed and self._nan is None:
            nan = torch.stack([own.isnan().any() for own in processed.values()])
            self._nan = model_runner.readbacks.start(nan.long())
        pipeline.sample_late(masks, processed)
        self._arriving += (each for tap in self._taps for each in tap.taken())

    def _edit(
        self, model_runner: ModelRunner, pipeline: Pipeline[Any], requests: Sequence[_Member]
    ) -> dict[Request, Tensor]:
        """Call the processors in this thread; a request whose processor fails samples from the unchanged logits."""
        if not requests:
            return {}
        rows = [each.row for each in requests]
        given = model_runner.thread.call(lambda: [pipeline.persistent.deferred.logits_of(row).float() for row in rows])
        processed = {}
        for each, logits in zip(requests, given, strict=True):
            try:
                processed[each.request] = processed_logits(each.request, logits)
            except RequestError as error:
                self.failed[each.request] = error
        return processed

    def read(self, tokens: Sequence[int]) -> list[UnreadOutput]:
        """Advance the forms by a step's tokens, late ones among them, and return what taps have of these."""
        self._advance(tokens)
        return self._arriving

    def _advance(self, tokens: Sequence[int]) -> None:
        requests = self._requests.present()
        sampled = [tokens[each.place] for each in requests.members]
        if requests.plain and NOT_A_TOKEN not in sampled:
            fits = requests.writer.accept(requests.matchers, sampled) if sampled else []
            if not all(fits):
                members = zip(requests.members, sampled, fits, strict=True)
                lost = [
                    each.request for each, token, fit in members if not fit and token not in each.request.stop_token_ids
                ]
                self.failed = {request: _lost(request) for request in lost}
        else:
            self._advance_one_by_one(requests.members, sampled)

    def _advance_one_by_one(self, members: Sequence[_Member], tokens: Sequence[int]) -> None:
        processed, nan = self._processed or {}, [] if self._nan is None else self._nan.result()
        for request in itertools.compress(processed, nan):
            self.failed.setdefault(request, _unusable(request))
        for (_, request, row, constraint), token in zip(members, tokens, strict=True):
            if token in request.stop_token_ids or request in self.failed:
                continue
            if token == NOT_A_TOKEN and request in processed:
                self.failed[request] = _unusable(request)
            elif constraint.masked and self._is_lost(row, constraint, token):
                self.failed[request] = _lost(request)

    def _is_lost(self, row: Row, constraint: Constraint, token: int) -> bool:
        """Advance by a token, if there is one; True if a form, or what the request bars, leaves none."""
        masks = self._masks if token == NOT_A_TOKEN or constraint.bars_more else None
        if masks is not None and not masks.bits[masks.rows.index(row)].any():
            return True
        return token != NOT_A_TOKEN and constraint.form is not None and not constraint.form.accepts(token)


def _mask_of(request: Request) -> NDArray[np.int32]:
    assert request.sampling is not None, "its constraint was applied to its settings"
    assert request.sampling.mask is not None, "each of its tokens has a mask"
    return request.sampling.mask


def _may_bar_more(constraint: Constraint) -> bool:
    return constraint.bars_more or (constraint.form is not None and constraint.form.least > 0)


def _masks(requests: Constrained, staging: Staging) -> Masks:
    """Return the tokens that may come next."""
    formed, masks = len(requests.forms), requests.masks
    bits = staging.lend(len(masks), len(masks[0]))
    if formed:
        requests.writer.fill(requests.matchers, bits[:formed])
    if formed < len(masks):
        bits[formed:] = masks[formed:]
    for at in requests.narrowed:
        each = requests.masked[at]
        each.constraint.narrow(bits[at], each.request.tokens)
    return Masks(requests.rows, bits)


def _lost(request: Request) -> RequestError:
    form = None if request.constraint is None else request.constraint.form
    if form is not None:
        return InvalidRequestError(form.no_token_left(len(request.tokens)))
    names = ", ".join(name for name, part in request.parts.items() if part.narrows)
    return InvalidRequestError(
        f"{names}: no token is left after {len(request.tokens)} new ones; see whether allowed_token_ids, bad_words and "
        "logits_processors leave some that it allows"
    )


def _unusable(request: Request) -> RequestError:
    return RequestError(
        f"logits_processors: no token can be drawn after {len(request.tokens)} new ones, because what they return is "
        "NaN, +inf or all -inf"
    )
