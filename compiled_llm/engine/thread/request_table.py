"""The requests that have not ended, with their handles."""

from __future__ import annotations

import time
from collections.abc import Sequence

from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.steps.request import Request
from compiled_llm.engine.thread.arrivals import Arrivals
from compiled_llm.engine.thread.handle import RequestHandle
from compiled_llm.engine.thread.output_processor import OutputProcessor
from compiled_llm.engine.thread.paused_requests import PausedRequests
from compiled_llm.requests.outputs import FinishReason


class RequestTable(dict[Request, RequestHandle]):
    """The handles of requests that have not ended."""

    def __init__(self, arrivals: Arrivals) -> None:
        super().__init__()
        self._arrivals = arrivals
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
        """Wake the listeners of these requests, and forget those that have ended."""
        ended = [request for request in changed if request.finish_reason is not None]
        handles = list(map(self.get, changed))
        now, last = time.monotonic(), list[RequestHandle | None]()
        for request in ended:
            request.finished = request.finished or now
            last.append(self.pop(request, None))
        try:
            self.output.tell(handles, last)
        finally:
            if ended:  # threads wait here for the end of requests, not for tokens
                with self._arrivals.changed:
                    self._arrivals.changed.notify_all()
