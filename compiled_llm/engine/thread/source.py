"""Where the answers of a handle come from, if their engine is in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence

from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import Figures, FinishReason
from compiled_llm.requests.text.answer_text import TextFormat


class EngineSource:
    """An engine, as the handles of its requests use it."""

    tokenizer_call = "compiled_llm.Engine(model, tokenizer=tokenizer)"
    failure: type[RuntimeError] = RequestError
    is_engine = True

    def __init__(self, engine_thread: EngineThread, runtime: Runtime) -> None:
        self._engine_thread, self._runtime = engine_thread, runtime

    def handle(self, requests: Sequence[Request], form: TextFormat | None = None) -> RequestHandle:
        """Return the handle of a prompt's requests."""
        handle = RequestHandle(requests, requests[0].prompt_ids.data, self, form)
        for request in requests:
            request.listeners = handle.listeners
        return handle

    def end(
        self, requests: Sequence[Request], index: int | None, reason: FinishReason, error: BaseException | None
    ) -> None:
        ending = [request for request in requests if not request.done and index in (None, request.index)]
        self._engine_thread.cancel(ending, reason, error)

    def figures(self, requests: Sequence[Request]) -> Figures:
        first, now = requests[0], time.monotonic()
        firsts = [request.first_token for request in requests if request.first_token is not None]
        ends = [now if request.finished is None else request.finished for request in requests]
        return Figures(
            cached_tokens=first.cached or 0,
            queue_seconds=None if first.admitted is None else first.admitted - first.submitted,
            first_token_seconds=min(firsts) - first.submitted if firsts else None,
            seconds=max(ends) - first.submitted,
        )

    def read(self, handle: RequestHandle) -> None:
        self._engine_thread.request_table.output.read([handle])

    def check_may_wait(self) -> None:
        self._engine_thread.step_lock.check_elsewhere()

    def check_process(self) -> None:
        self._runtime.home.check()
