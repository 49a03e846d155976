"""What ``submit`` returns: a prompt's answers on their way."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from compiled_llm.engine.logprobs import cumulative, token_logprobs
from compiled_llm.engine.output import Completion, RequestOutput
from compiled_llm.engine.request import Request, RequestError

logger = logging.getLogger("compiled_llm.engine")


class RequestHandle:
    """A submitted prompt: iterate over its tokens as they come, wait for its ``result``, or ``cancel`` it.

    Any thread may use it; ``async for`` and ``await`` work in any event loop.

    Attributes:
        requests: the answers, to be read only.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        cancel: Callable[[Sequence[Request]], None],
        decode: Callable[[list[int]], str] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for requests.

        Args:
            requests: the answers to one prompt.
            cancel: ends requests.
            decode: turns tokens into text.
            check: raises an error in a thread that must not wait, because the engine does not run meanwhile.
        """
        self.requests = requests
        self._cancel = cancel
        self._decode = decode
        self._check = check
        self._changed = threading.Condition()
        self._waiting = 0  # threads
        self._listeners: set[Callable[[], object]] = set()

    def __repr__(self) -> str:
        """How far it is."""
        tokens, reasons = [len(request.tokens) for request in self.requests], self._reasons()
        return f"<{type(self).__name__}: {', '.join(map(str, tokens))} tokens, {', '.join(reasons)}>"

    def _reasons(self) -> list[str]:
        rows = [request.row for request in self.requests]
        both = zip(self.requests, rows, strict=True)
        return [request.finish_reason or ("waiting" if row is None else "running") for request, row in both]

    @property
    def done(self) -> bool:
        """Whether all answers have ended."""
        return all(request.done for request in self.requests)

    def cancel(self, index: int | None = None) -> None:
        """End what has not ended, or the answer of that index alone; tokens so far stay."""
        self._cancel([entry for entry in self.requests if not entry.done and index in (None, entry.index)])

    def when_changed(self, listener: Callable[[], object]) -> None:
        """Have ``listener`` called whenever a token has come or an answer has ended, between two steps."""
        self._listeners.add(listener)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.

        Raises:
            TimeoutError: it has not ended by then; it goes on.
            RuntimeError: it cannot end meanwhile, because this thread has paused the engine, or runs it.
            Exception: what ended an answer with the finish reason ``"error"``.
        """
        if not self._wait_until(lambda: self.done, timeout):
            raise TimeoutError(f"the request has not ended after {timeout} s; it goes on, unless you cancel() it")
        self._raise_error()
        return self.output()

    def output(self) -> RequestOutput:
        """Return what it came to, errors included, once it is ``done``."""
        first, now = self.requests[0], time.monotonic()
        firsts = [request.first_token for request in self.requests if request.first_token is not None]
        ends = [now if request.finished is None else request.finished for request in self.requests]
        return RequestOutput(
            prompt_token_ids=first.prompt.tolist(),
            outputs=[self._completion(request) for request in self.requests],
            cached_tokens=first.cached or 0,
            queue_seconds=None if first.admitted is None else first.admitted - first.submitted,
            first_token_seconds=min(firsts) - first.submitted if firsts else None,
            seconds=max(ends) - first.submitted,
        )

    def _completion(self, request: Request) -> Completion:
        tokens = list(request.tokens)
        text = None if self._decode is None else self._decode(tokens)
        logprobs = token_logprobs(request, tokens)
        return Completion(
            index=request.index,
            token_ids=tokens,
            finish_reason=request.finish_reason or "cancelled",
            text=text,
            error=request.error,
            logprobs=logprobs,
            cumulative_logprob=None if logprobs is None else cumulative(logprobs, tokens),
        )

    def raise_failure(self) -> None:
        """Raise what ended all requests, if this is how it ended."""
        for request in self.requests:
            if request.error is not None and not isinstance(request.error, RequestError):
                raise request.error

    def _raise_error(self) -> None:
        error = next((request.error for request in self.requests if request.error is not None), None)
        if error is not None:
            raise error

    def _wait_until(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        if not ready():
            self._check()
        with self._changed:
            self._waiting += 1  # whoever does not see this has changed everything before, and ``ready`` is asked now
            try:
                return self._changed.wait_for(ready, timeout)
            finally:
                self._waiting -= 1

    # ---- tokens as they come

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens as they come.

        Raises:
            ValueError: there are several answers.
            Exception: what ended it with the finish reason ``"error"``.
        """
        request, count = self._only(), 0
        while not (request.done and count == len(request.tokens)):
            yield from (new := self._behind(request, count))
            count += len(new)
        self._raise_error()

    def _behind(self, request: Request, count: int) -> list[int]:
        """Wait for more than ``count`` tokens or the end, and return those behind them."""
        self._wait_until(lambda: len(request.tokens) > count or request.done)
        return request.tokens[count:]

    async def __aiter__(self) -> AsyncIterator[int]:
        """As ``__iter__``, for ``async for``."""
        request, count = self._only(), 0
        with self._listening() as event:
            while True:
                event.clear()
                ended, new = request.done, request.tokens[count:]
                for token in new:
                    yield token
                count += len(new)
                if ended and count == len(request.tokens):
                    break
                if not (new or ended):
                    await event.wait()
        self._raise_error()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """Return the result, for ``await``."""
        return self._ended().__await__()

    async def _ended(self) -> RequestOutput:
        with self._listening() as event:
            while not self.done:
                event.clear()
                if not self.done:
                    await event.wait()
        return self.result()

    @contextmanager
    def _listening(self) -> Iterator[asyncio.Event]:
        """Yield an event of the running event loop that is set whenever something has changed."""
        event, loop = asyncio.Event(), asyncio.get_running_loop()
        self._listeners.add(listener := lambda: loop.call_soon_threadsafe(event.set))
        try:
            yield event
        finally:
            self._listeners.discard(listener)

    def _only(self) -> Request:
        if len(self.requests) > 1:
            raise ValueError(f"n={len(self.requests)}: several answers have no one stream of tokens; use result()")
        return self.requests[0]

    # ---- used by the engine

    def forget_other_threads(self) -> None:
        """End in a forked process, which does not have the thread that runs the engine."""
        self._changed, self._waiting = threading.Condition(), 0
        self._listeners.clear()
        for request in self.requests:
            if not request.done:
                request.finish_reason = "error"
                request.error = RuntimeError(
                    "the request runs in the process that this one was forked from; wait for it there, or submit it "
                    "to an engine that is made here"
                )

    @property
    def awaited(self) -> bool:
        """Whether anybody waits for a token or for the end; in each step of many requests nobody does for most."""
        return self._waiting > 0 or bool(self._listeners)

    def notify(self) -> None:
        """Wake whoever waits: a token has come, or an answer has ended."""
        if self._waiting:
            with self._changed:
                self._changed.notify_all()
        for listener in tuple(self._listeners):
            try:
                listener()
            except Exception as error:  # an event loop was closed in the midst of it: that ends nobody's request
                self._listeners.discard(listener)
                logger.warning("compiled_llm: a listener has failed, and hears no more: %s", error)
