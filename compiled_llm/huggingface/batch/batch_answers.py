"""The answers to a prompt of ``generate_batch``, as outputs in HuggingFace's queues."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from compiled_llm.compat.continuous_batching import OutputRouter, RequestState, RequestStatus, note_times
from compiled_llm.engine.steps.request import Request
from compiled_llm.requests.answer import Answer
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.users_code import raise_interrupt

logger = logging.getLogger("compiled_llm.generate")


class _Open(NamedTuple):
    """An answer that is not over, with the state that outputs are made of."""

    state: RequestState
    answer: Answer


class BatchAnswers:
    """The answers to one prompt that are not over, by HuggingFace's ids: the request itself first, then its children.

    States are brought up to date when an output is due; until then, the engine alone has the tokens.
    """

    def __init__(
        self,
        states: Sequence[RequestState],
        handle: RequestHandle,
        router: OutputRouter,
        ended: Callable[[], object],
    ) -> None:
        """Deliver outputs to ``router``, and call ``ended`` once all answers are over."""
        answers = zip(states, handle.answers, strict=True)
        self._open = {state.request_id: _Open(state, answer) for state, answer in answers}
        self._handle = handle
        self._router = router
        self._ended = ended
        self._lock = threading.RLock()  # also while outputs are delivered, so that the last one is delivered last

    @property
    def states(self) -> dict[str, RequestState]:
        """The states of answers that are not over, by id."""
        return {request_id: each.state for request_id, each in self._open.copy().items()}

    @property
    def running(self) -> bool:
        return any(request.admitted is not None for request in self._handle.requests)

    def follow(self) -> None:
        """Report the progress of the engine's requests from now on."""
        follows = any(state.streaming or state.record_timestamps for state in self.states.values())
        (self._handle.when_changed if follows else self._handle.when_ended)(self._tell)
        self._tell()

    def cancel(self, request_id: str) -> None:
        """End one answer, without any more output of it; if the prompt has not begun, all of them."""
        with self._lock:
            ids = [request_id] if self.running else [*self._open]
            cancelled = [each for each in (self._open.pop(each, None) for each in ids) if each is not None]
            self._deliver([])
        for each in cancelled:
            self._handle.cancel(each.answer.index)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            for each in self._open.values():
                _fail(each.state, error)
            self._deliver([*self._open.values()])
        self._handle.cancel()

    def _tell(self) -> None:
        """Deliver outputs that are due; runs between two steps of the engine."""
        with self._lock:
            self._deliver([each for each in self._open.values() if _brought_up(each.state, each.answer)])

    def _deliver(self, due: Sequence[_Open]) -> None:
        if due:
            deliver(self._router, [each.state for each in due])
        for each in due:
            if each.state.status >= RequestStatus.FINISHED:
                self._open.pop(each.state.request_id, None)
        if not self._open:
            self._ended()


def deliver_failure(router: OutputRouter, states: Sequence[RequestState], error: BaseException) -> None:
    """Deliver that no request of a prompt has begun."""
    for state in states:
        _fail(state, error)
    deliver(router, states)


def deliver(router: OutputRouter, states: Sequence[RequestState]) -> None:
    try:
        router.deliver_batch([state.to_generation_output() for state in states])
    except BaseException as error:  # an event loop that is closed, or a callback of the user's
        raise_interrupt(error)
        logger.warning("compiled_llm: generate_batch: an output of %s is lost: %s", states[0].request_id, error)


def _brought_up(state: RequestState, answer: Answer) -> bool:
    """Bring a state up to date if an output of it is due; return whether it is."""
    ended, count = answer.done, answer.tokens  # in this order: no token comes after the end
    if state.record_timestamps:
        note_times(state, count)
    if not (ended or (state.streaming and count > len(state.generated_tokens))):
        return False
    state.generated_tokens = tokens = answer.tokens_after(0)[:count]
    known = len(state.logprobs)
    scores = answer.rows("logprobs", known, tokens[known:]) or ()
    state.logprobs.extend(next(iter(each.values())).logprob for each in scores)
    admitted = cast(Request, answer.record).admitted
    if state.status == RequestStatus.PENDING and admitted is not None:
        state.status = RequestStatus.DECODING
        state.lifespan = (time.perf_counter() - (time.monotonic() - admitted), -1)
    reason = answer.finish_reason
    if ended and reason in ("stop", "length"):
        state.status = RequestStatus.FINISHED
    elif ended:
        _fail(state, answer.error or RuntimeError(f"the engine has ended it: {reason}"))
    return True


def _fail(state: RequestState, error: BaseException) -> None:
    state.error = f"{type(error).__name__}: {error}"
    state.status = RequestStatus.FAILED
