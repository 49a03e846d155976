"""A prompt given to ``generate_batch``, and the outputs of its answers for HuggingFace's queues."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence

from compiled_llm.compat.continuous_batching import OutputRouter, RequestState, RequestStatus, note_times
from compiled_llm.engine.steps.request import Request
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.users_code import raise_interrupt

logger = logging.getLogger("compiled_llm.generate")


class BatchAnswers:
    """The answers to one prompt, as states of HuggingFace's: the request itself first, then its children."""

    # The engine's requests have the tokens; states are brought up to date when an output is due. ``handle`` is of the
    # engine's requests, in the same order, and None before ``follow``.

    def __init__(
        self, states: Sequence[RequestState], router: OutputRouter, ended: Callable[[BatchAnswers], object]
    ) -> None:
        """Deliver outputs to ``router``, and call ``ended`` once all answers have ended."""
        self.states = states
        self.handle: RequestHandle | None = None
        self._router = router
        self._ended = ended
        self._cancelled: set[str] = set()
        self._lock = threading.RLock()

    @property
    def done(self) -> bool:
        return all(self._is_over(state) for state in self.states)

    @property
    def running(self) -> bool:
        return self.handle is not None and any(request.admitted is not None for request in self.handle.requests)

    def _is_over(self, state: RequestState) -> bool:
        return state.status >= RequestStatus.FINISHED or state.request_id in self._cancelled

    def follow(self, handle: RequestHandle) -> None:
        """Report the progress of the engine's requests from now on."""
        with self._lock:
            self.handle, cancelled = handle, [state.request_id in self._cancelled for state in self.states]
        for index in itertools.compress(range(len(cancelled)), cancelled):
            handle.cancel(index)
        follows = any(state.streaming or state.record_timestamps for state in self.states)
        (handle.when_changed if follows else handle.when_ended)(self._tell)
        self._tell()

    def cancel(self, request_id: str) -> None:
        """End one answer, without any more output of it; if the prompt has not begun, all of them."""
        cancelled = [state for state in self.states if state.request_id == request_id or not self.running]
        with self._lock:
            self._cancelled.update(state.request_id for state in cancelled)
        if self.handle is not None:
            for state in cancelled:
                self.handle.cancel(self.states.index(state))
        self._tell()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            open_ones = [state for state in self.states if not self._is_over(state)]
            for state in open_ones:
                _fail(state, error)
            self._deliver(open_ones)
        if self.handle is not None:
            self.handle.cancel()

    def _tell(self) -> None:
        """Deliver outputs that are due; runs between two steps of the engine."""
        with self._lock:
            requests = () if self.handle is None else self.handle.requests
            both = zip(self.states, requests, strict=False)
            due = [state for state, request in both if not self._is_over(state) and _brought_up(state, request)]
            self._deliver(due)

    def _deliver(self, due: Sequence[RequestState]) -> None:
        if due:  # under the lock, so that the last output is delivered last
            try:
                self._router.deliver_batch([state.to_generation_output() for state in due])
            except BaseException as error:  # an event loop that is closed, or a callback of the user's
                raise_interrupt(error)
                logger.warning("compiled_llm: generate_batch: an output of %s is lost: %s", due[0].request_id, error)
        if self.done:
            self._ended(self)


def _brought_up(state: RequestState, request: Request) -> bool:
    """Bring a state up to date if an output of it is due; return whether it is."""
    ended, count = request.done, len(request.tokens)  # in this order: no token comes after the end
    if state.record_timestamps:
        note_times(state, count)
    if not (ended or (state.streaming and count > len(state.generated_tokens))):
        return False
    state.generated_tokens = request.tokens[:count]
    if (scores := request.part("logprobs")) is not None:
        known = len(state.logprobs)
        entries = scores.rows(known, request.tokens[known:count])
        state.logprobs.extend(next(iter(own.values())).logprob for own in entries or ())
    if state.status == RequestStatus.PENDING and request.admitted is not None:
        state.status = RequestStatus.DECODING
        state.lifespan = (time.perf_counter() - (time.monotonic() - request.admitted), -1)
    if request.finish_reason in ("stop", "length"):
        state.status = RequestStatus.FINISHED
    elif ended:
        _fail(state, request.error or RuntimeError(f"the engine has ended it: {request.finish_reason}"))
    return True


def _fail(state: RequestState, error: BaseException) -> None:
    state.error = f"{type(error).__name__}: {error}"
    state.status = RequestStatus.FAILED
