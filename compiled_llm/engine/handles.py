"""Who waits for which request."""

from __future__ import annotations

import time
from collections.abc import Sequence

from compiled_llm.engine.handle import RequestHandle
from compiled_llm.engine.request import Request


class Handles(dict[Request, RequestHandle]):
    """The handles of requests that have not ended."""

    def notify(self, changed: Sequence[Request]) -> bool:
        """Tell whoever waits for these requests, and forget those that have ended; whether there are such."""
        ended = [request for request in changed if request.finish_reason is not None]
        handles = list(map(self.get, changed))
        now = time.monotonic()
        for request in ended:
            request.finished = request.finished or now
            self.pop(request, None)
        for handle in handles:
            if handle is not None and handle.awaited:
                handle.notify()
        return bool(ended)
