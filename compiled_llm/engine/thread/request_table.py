"""The requests that have not ended, with their handles."""

from __future__ import annotations

import time
from collections.abc import Sequence

from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.thread.arrivals import Arrivals
from compiled_llm.engine.thread.output_processor import OutputProcessor
from compiled_llm.engine.thread.paused_requests import PausedRequests
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.listeners import Listeners, tell
from compiled_llm.requests.outputs import FinishReason


class RequestTable(dict[Request, RequestHandle]):
    """The handles of requests that have not ended."""

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__()
        self._arrivals = arrivals
        # those that have changed last, as one list, if none has ended; and which of them somebody listens to, as of an
        # ``audience``
        self._changed: Sequence[Request] | None = None
        self._told: list[Listeners] = []
        self._texts: list[RequestHandle] = []  # those whose text is made before they are told of
        self._audience: object = None
        self.output = OutputProcessor(arrivals)  # makes the text of those that are read as text
        # keeps requests from the scheduler while weights are about to change
        self.paused_requests = PausedRequests(arrivals, self)

    def end(
        self, loop: Loop | None, requests: Sequence[Request], reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """End requests; if ``loop`` is None, no loop knows them yet."""
        for request in requests:
            if loop is not None:
                loop.scheduler.end(request, reason, error)
            elif not request.done:
                request.finish_reason, request.error = reason, error
        self.notify(requests)

    def notify(self, changed: Sequence[Request]) -> None:
        """Wake the listeners of these requests, and forget those that have ended.

        None has ended if it is the same list as the last time.
        """
        if changed is self._changed and Listeners.audience is self._audience:
            if self._texts:
                self.output.read(self._texts)
            if self._told:
                tell(self._told)
            return
        audience = Listeners.audience  # first: who begins to listen meanwhile is found the next time
        ended = [request for request in changed if request.finish_reason is not None]
        awaited = [handle for request in changed if (handle := self.get(request)) is not None and handle.awaited]
        self._texts = texts = [handle for handle in awaited if handle.has_text]
        self._told = told = [handle.listeners for handle in awaited if not handle.has_text]
        self._changed, self._audience = (None, None) if ended else (changed, audience)
        now, last = time.monotonic(), list[Listeners]()
        for request in ended:
            request.finished = request.finished or now
            if (handle := self.pop(request, None)) is not None and not handle.has_text:
                last.append(handle.end_listeners)
        try:
            if texts:
                self.output.read(texts)
            if told or last:
                tell([*told, *last])
        finally:
            if ended:  # threads wait here for the end of requests, not for tokens
                with self._arrivals.changed:
                    self._arrivals.changed.notify_all()
