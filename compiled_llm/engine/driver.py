"""Who runs the loop: one thread at a time, that of a caller who waits for answers, or one of the engine's own.

Requests come in as messages, which whoever runs the loop takes between two steps; so nobody else writes its state.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from compiled_llm.engine.handle import RequestHandle
from compiled_llm.engine.inbox import Inbox
from compiled_llm.engine.loop import Loop
from compiled_llm.engine.model_check import ModelCheck
from compiled_llm.engine.pace import Pace
from compiled_llm.engine.request import FinishReason, Request
from compiled_llm.engine.scheduler import Scheduler
from compiled_llm.execution.runtime import Runtime
from compiled_llm.execution.threads.interrupts import check, deferred

logger = logging.getLogger("compiled_llm.engine")

_STUCK = 0.005
"""Seconds between two looks for pages that others have."""
_PATIENCE = 0.2
"""Seconds after which a thread that waits looks whether Ctrl-C has been pressed."""


class Driver:
    """Runs the loop of one engine.

    Attributes:
        check: looks at the model.
        loop: runs steps on the model as it is placed now; None before the first request.
        handles: of the requests that have not ended.
        closed: whether it runs no more.
    """

    def __init__(
        self, model: PreTrainedModel, runtime: Runtime, max_rows: int, max_step_ms: float | None, prefix_cache: bool
    ) -> None:
        """Begin without requests.

        Args:
            model: wrapped.
            runtime: its compiled side.
            max_rows: how many requests run at once.
            max_step_ms: how long a step may take; None for as long as it takes.
            prefix_cache: keep pages of texts.
        """
        self._model = model
        self._runtime = runtime
        self._max_rows = max_rows
        self._max_step_ms = max_step_ms
        self._prefix_cache = prefix_cache
        self.check = ModelCheck(model, runtime)
        self.loop: Loop | None = None
        self.handles: dict[Request, RequestHandle] = {}
        self.closed = False
        self._process = os.getpid()
        self._inbox = Inbox()
        self._changed = self._inbox.changed
        weakref.finalize(self, self._inbox.close).atexit = False
        self._runner: int | None = None  # the thread that runs the loop
        self._pausing = 0  # threads that want nobody to
        self._thread: threading.Thread | None = None

    # ---- messages, from any thread

    def add(self, handle: RequestHandle, requests: Sequence[Request]) -> None:
        """Let requests wait for their turn.

        Raises:
            RuntimeError: the engine is closed.
        """

        def add(loop: Loop) -> None:
            for request in requests:
                loop.scheduler.add(request)

        with self._changed:
            self._inbox.send(add)
            self.handles.update(dict.fromkeys(requests, handle))

    def cancel(self, requests: Sequence[Request]) -> None:
        """End requests before the next step."""
        with self._changed:
            if requests and not self.closed:
                self._inbox.send(lambda loop: self._end(loop, requests, "cancelled"))

    @property
    def open(self) -> bool:
        """Whether it takes requests, in this process."""
        return not self.closed and os.getpid() == self._process

    @property
    def busy(self) -> bool:
        """Whether there are requests that have not ended."""
        return bool(self.handles)

    @property
    def waiting(self) -> int:
        """How many requests have not begun to run, or run no more."""
        return len(self.handles) - (0 if self.loop is None else len(self.loop.scheduler.running))

    # ---- one thread at a time

    def run(self, done: Callable[[], bool]) -> None:
        """Run the loop in this thread until ``done``, or wait while another thread runs it.

        Raises:
            RuntimeError: this thread has paused it.
        """
        # Without gradients, as ``generate``: each step would have to leave that world otherwise.
        with deferred(), torch.no_grad():
            while not done():
                with self._changed:
                    self._check_elsewhere()
                    self._wait_until(lambda: done() or (self._runner is None and not self._pausing))
                    if done():
                        return
                    self._runner = threading.get_ident()
                try:
                    self._run(lambda: bool(done() or self._pausing))
                finally:
                    self._leave()

    def answer(self, handles: Sequence[RequestHandle]) -> None:
        """Run the loop in this thread until these have ended; if it is interrupted, they end."""
        remaining = list(handles)

        def ended() -> bool:  # asked after each step: who has ended is not asked again
            while remaining and remaining[-1].done:
                remaining.pop()
            return not remaining or self.closed

        with deferred():
            try:
                self.run(ended)
            finally:
                for handle in handles:
                    handle.cancel()
                self._receive_unless_running()

    @property
    def here(self) -> bool:
        """Whether this thread runs the loop, or has paused it."""
        return self._runner == threading.get_ident()

    def _check_elsewhere(self) -> None:
        if self.here:
            raise RuntimeError("the engine is paused, or running, in this thread; call this from outside of it")

    def _wait_until(self, ready: Callable[[], object]) -> None:
        while not ready():
            self._changed.wait(_PATIENCE)
            check()

    @contextmanager
    def paused(self) -> Iterator[Loop | None]:
        """Let no thread run the loop for the block, once the step that it is in has been launched.

        Returns:
            Yields the loop.

        Raises:
            RuntimeError: this thread runs it, or it belongs to another process.
        """
        self._pause()
        try:
            if self.loop is not None:
                self._inbox.deliver(self.loop)
            yield self.loop
        finally:
            self._leave()

    @deferred()
    def _pause(self) -> None:
        with self._changed:
            self._check_elsewhere()
            if os.getpid() != self._process:
                raise RuntimeError("the engine belongs to the process that made it; make one in this process")
            self._pausing += 1
            try:
                self._wait_until(lambda: self._runner is None)
                self._runner = threading.get_ident()
            finally:
                self._pausing -= 1
                self._changed.notify_all()

    def _receive_unless_running(self) -> None:
        """Take messages, unless somebody runs the loop, who takes them."""
        with self._changed:
            if self._runner is None and self.loop is not None:
                self._inbox.deliver(self.loop)

    def _leave(self) -> None:
        with self._changed:
            self._runner = None
            self._changed.notify_all()

    def start_thread(self) -> None:
        """Let a thread of our own run the loop while there are requests."""
        with self._changed:
            if self._thread is None:
                arguments = weakref.ref(self), self._inbox
                self._thread = threading.Thread(target=_serve, args=arguments, name="compiled_llm engine", daemon=True)
                self._thread.start()

    def serve(self) -> None:
        """Run the loop until no request is left."""
        self.run(lambda: self.closed or not (self._inbox or (self.loop is not None and not self.loop.idle)))

    def close(self) -> None:
        """End all requests and give everything back; nothing is run afterwards."""
        with self.paused() as loop:
            self.closed = True
            self._inbox.close()
            self._end(loop, list(self.handles), "cancelled")
            if loop is not None:
                loop.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # ---- in the thread that runs it

    def _run(self, done: Callable[[], bool]) -> None:
        while not done():
            try:
                loop = self._current_loop()
            except Exception as error:  # the model is where it cannot run, or there is no memory for its pages
                self._give_up(error)
                continue
            self._inbox.deliver(loop)
            if loop.idle:
                with self._changed:
                    self._wait_until(lambda: self._inbox or done())
                continue
            with self._runtime.loop_lock.taken(fits=lambda: True):
                self._work(loop, done)
            self.check.forget()  # whoever waited for what has ended may change it now
            if loop.stuck:
                time.sleep(_STUCK)

    def _work(self, loop: Loop, done: Callable[[], bool]) -> None:
        """Run steps while there is something to run.

        A loop that is stuck has no pages, and goes: others may wait for all that have any to end.
        """
        lock, loop.stuck = self._runtime.loop_lock, False
        while not (done() or loop.idle or loop.stuck):
            try:
                self._step(loop)
            except BaseException as error:
                self.drain(loop)
                self._restart(loop, error)
                if not isinstance(error, Exception):
                    raise
            if lock.wanted and not loop.stuck:
                with lock.yielded():
                    time.sleep(0)

    def _step(self, loop: Loop) -> None:
        self._inbox.deliver(loop)
        looked = self.check.look_if_due(loop.device_model)
        if looked and loop.prefixes is not None and loop.device_model.watch.changed():
            loop.prefixes.clear()
        self._notify(loop.scheduler.expire(time.monotonic()))
        loop.scheduler.admits = not self._runtime.loop_lock.short_of_pages
        self._notify(loop.step(unchanged=not looked))

    def model_may_have_changed(self, weights_stay: bool) -> None:
        """Look at the model before the next step; unless its weights stay, forget what was computed with them."""
        self.check.forget()
        if self.loop is not None and self.loop.prefixes is not None and not weights_stay:
            self.loop.prefixes.clear()

    def drain(self, loop: Loop) -> None:
        """Read the tokens of the step that was launched last; if that fails, what runs has failed."""
        try:
            self._notify(loop.drain())
        except Exception as error:
            self._restart(loop, error)

    def _restart(self, loop: Loop, error: BaseException) -> None:
        """Begin anew after a step that failed: what ran has failed with it, unless somebody has interrupted it.

        If nothing ran, nothing can: then all have failed.
        """
        failed = loop.underway or list(self.handles)
        loop.restart()
        self.check.forget()
        if isinstance(error, Exception):
            logger.error("compiled_llm: %d requests have failed: %s", len(failed), error)
            self._end(loop, failed, "error", error)

    def _give_up(self, error: Exception) -> None:
        """End all requests; there is no loop to run them."""
        self._inbox.clear()
        self._end(self.loop, list(self.handles), "error", error)
        if self.loop is not None:
            self.loop.close()
            self.loop = None

    def _end(
        self, loop: Loop | None, requests: Sequence[Request], reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """End requests, which no loop knows yet if it is None."""
        for request in requests:
            if loop is None:
                request.finish_reason, request.error = reason, error
            else:
                loop.scheduler.end(request, reason, error)
        self._notify(requests)

    def _notify(self, changed: Sequence[Request]) -> None:
        """Tell whoever waits for these requests."""
        ended = [request for request in changed if request.finish_reason is not None]
        handles = list(map(self.handles.get, changed))
        now = time.monotonic()
        for request in ended:
            request.finished = request.finished or now
            self.handles.pop(request, None)
        for handle in handles:
            if handle is not None and handle.awaited:
                handle.notify()
        if ended:  # nobody waits here for a token
            with self._changed:
                self._changed.notify_all()

    def _current_loop(self) -> Loop:
        """Return the loop on the model as it is placed now; requests that run stay with theirs, and end there."""
        device_model = self.check.begin()
        if self.loop is None or (self.loop.device_model is not device_model and self.loop.idle):
            device_model.prefixes.clear()  # who knows of which weights they are
            prefixes = device_model.prefixes if self._prefix_cache else None
            pace = Pace(self._max_step_ms, device_model.config.prefill_tokens)
            scheduler = Scheduler(device_model.pool, self._max_rows, pace.tokens, prefixes)
            self.loop = Loop(device_model, scheduler, pace, prefixes)
        return self.loop


def _serve(reference: weakref.ref[Driver], inbox: Inbox) -> None:
    """Run the loop while there are requests; the thread of an engine that nobody holds any more ends."""
    while inbox.wait():
        if (driver := reference()) is None:
            return
        driver.serve()
        del driver
