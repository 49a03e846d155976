"""What a step emits of the tokens that it computes: copied on the device next to it, and counted with its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from compiled_llm.compilation.graphs.outputs import Emitted
from compiled_llm.engine.steps.request import InvalidRequestError, Request
from compiled_llm.engine.steps.request_emitted import KeptSteps, RequestEmitted
from compiled_llm.execution.batch import Tap, TokenSpan
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.state.emitted_steps import EmittedSteps


class _Span(NamedTuple):
    """Which of the kept tokens are a request's, from position ``first`` on."""

    request: Request
    emitted: RequestEmitted
    tokens: slice
    first: int

    def after(self, launches: int) -> int:
        """Return the position after so many launches."""
        return int(self.first + launches * (self.tokens.stop - self.tokens.start))


class ArrivingEmitted(NamedTuple):
    """What one launch has emitted, whose tokens have not been read.

    Attributes:
        steps: the launches of the same rows, this one among them.
        spans: whose it is.
        keys: under which it was emitted.
        nbytes: of one launch.
    """

    steps: KeptSteps
    spans: Sequence[_Span]
    keys: frozenset[int | str]
    nbytes: int

    def hand_out(self) -> dict[Request, InvalidRequestError]:
        """Give it to requests that have not ended; return those that want what the launch has not emitted."""
        self.steps.read += 1
        return self._begin() if self.steps.read == 1 else {}

    def goes_on(self, spans: Sequence[_Span], kept: Sequence[slice], keys: frozenset[int | str]) -> bool:
        """Return whether a launch of these is of the same rows, and of the tokens that follow those of the last one."""
        launches = self.steps.emitted.count
        going_on = [(span.request, span.after(launches)) for span in self.spans]
        wanted = [(span.request, span.first) for span in spans]
        return (self.steps.emitted.kept, self.keys, going_on) == (kept, keys, wanted)

    def _begin(self) -> dict[Request, InvalidRequestError]:
        failed = {}
        for request, emitted, tokens, first in self.spans:
            if lacking := emitted.wanted.keys.difference(self.keys):
                failed[request] = _lacks(min(lacking, key=str))
            elif not request.done:
                emitted.append(self.steps, tokens, first)
        return failed


def _lacks(key: int | str) -> InvalidRequestError:
    if isinstance(key, str):
        return InvalidRequestError(f"emitted: no traced hook emits {key!r}; leave it out")
    return InvalidRequestError(f"hidden_states: the forward of this model gives none of layer {key}; leave it out")


class EmittedReader(Tap):
    """Reader of what each step of one plan emits of its requests' tokens."""

    def __init__(self, model_runner: ModelRunner, wanting: Iterable[tuple[Request, RequestEmitted]]) -> None:
        self._executor = model_runner.thread
        self._wanting = {request.running_row: (request, emitted) for request, emitted in wanting}
        self._keys = {key for _, emitted in self._wanting.values() for key in emitted.wanted.keys}
        self.wants = ("hidden_states",) if any(isinstance(key, int) for key in self._keys) else ()
        self._last: ArrivingEmitted | None = None  # what was read last, with its arguments
        self._spans: Sequence[TokenSpan] = ()
        self._later = 0
        self._arriving: list[ArrivingEmitted] = []

    @classmethod
    def of(cls, model_runner: ModelRunner, requests: Iterable[Request]) -> EmittedReader | None:
        """Return a reader for those that want something; None if nobody does."""
        wanting = [(request, request.emitted) for request in requests if request.emitted is not None]
        return cls(model_runner, wanting) if wanting else None

    def launched(self, spans: Sequence[TokenSpan], emitted: Emitted, later: int = 0) -> None:
        """Copy what is wanted of a launch, on the device."""
        launch = self._last
        if launch is None or spans is not self._spans or later != self._later + 1:
            launch = self._of(spans, emitted, later)
        self._last, self._spans, self._later = launch, spans, later
        if launch.spans:
            launch.steps.emitted.keep(emitted)
            self._arriving.append(launch)

    def _of(self, spans: Sequence[TokenSpan], emitted: Emitted, later: int) -> ArrivingEmitted:
        """Return the last launch if this one goes on with it, as after rows got pages; else the first of others."""
        found: list[_Span] = []
        kept: list[slice] = []  # of the packed tokens; requests next to each other have one
        at = count = 0
        for row, first, size in spans:
            if row in self._wanting:
                found.append(_Span(*self._wanting[row], slice(count, count + size), first + later))
                start = kept.pop().start if kept and kept[-1].stop == at else at
                kept.append(slice(start, at + size))
                count += size
            at += size
        keys = frozenset(self._keys.intersection(emitted))
        if self._last is not None and self._last.goes_on(found, kept, keys):
            return self._last
        nbytes = sum(count * emitted[key][:1].nbytes for key in keys)
        return ArrivingEmitted(KeptSteps(EmittedSteps(kept, keys), self._executor), found, keys, nbytes)

    def begin_again(self) -> None:
        """Keep the next launches apart from those before, whose memory is then given back."""
        self._last = None

    def taken(self) -> list[ArrivingEmitted]:
        """Return what was read since the last call."""
        arriving, self._arriving = self._arriving, []
        return arriving
