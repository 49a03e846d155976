"""Who runs the loop: one thread at a time, that of a caller who waits for answers, or one of the engine's own.

Requests come in as messages, which whoever runs the loop takes between two steps; so nobody else writes its state.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from compiled_llm.engine.device_loss import device_lost, restarted
from compiled_llm.engine.handle import RequestHandle
from compiled_llm.engine.handles import Handles
from compiled_llm.engine.inbox import Inbox
from compiled_llm.engine.intake import check_queue
from compiled_llm.engine.loop import Loop, LoopSettings
from compiled_llm.engine.metrics import EngineStats, stats_of
from compiled_llm.engine.model_check import ModelCheck
from compiled_llm.engine.request import FinishReason, Request
from compiled_llm.engine.serving import serving_thread
from compiled_llm.engine.shortage import Shortage
from compiled_llm.engine.turns import Turns
from compiled_llm.execution.runtime import Runtime
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kvcache.pool import PagePool

logger = logging.getLogger("compiled_llm.engine")


class Driver:
    """Runs the loop of one engine.

    What the loop knows of rows and pages changes only while the model's loop lock is held, by whoever runs it, or by a
    call that lacks pages (``give_back``).

    Attributes:
        check: looks at the model.
        loop: runs steps on the model as it is placed now; None before the first request.
        turns: which thread runs the loop.
        handles: of the requests that have not ended.
        closed: whether it runs no more.
    """

    def __init__(self, model: PreTrainedModel, runtime: Runtime, settings: LoopSettings) -> None:
        """Begin without requests.

        Args:
            model: wrapped.
            runtime: its compiled side.
            settings: what the user says of its loop.
        """
        self._runtime = runtime
        self._settings = settings
        self.check = ModelCheck(model, runtime, settings.watch_model)
        self.loop: Loop | None = None
        self.closed = False
        self._past = EngineStats()
        self._shortage = Shortage()
        self._parked: list[Request] = []  # that go on in the next loop
        self._inbox = Inbox()
        self._changed = self._inbox.changed
        self.handles = Handles(self._inbox)
        self.turns = Turns(self._changed)
        weakref.finalize(self, self._inbox.close).atexit = False
        self._thread: threading.Thread | None = None

    # ---- messages, from any thread

    def add(self, handles: Sequence[RequestHandle], most_waiting: int | None = None) -> None:
        """Let requests wait for their turn; those that are not ``ready`` have to ``arrive`` later.

        Args:
            handles: of the requests.
            most_waiting: how many requests may wait with them; None for any number.

        Raises:
            RuntimeError: the engine is closed, or asleep.
            QueueFullError: more would wait; none was added.
        """
        requests = {request: handle for handle in handles for request in handle.requests}
        with self._changed:
            self.check.check_awake()
            check_queue(self.waiting, len(requests), most_waiting)
            self.arrive([request for request in requests if request.ready])
            self.handles.update(requests)

    def arrive(self, requests: Sequence[Request]) -> None:
        """Let requests wait for their turn whose handles were added."""
        self.handles.held.arrive(requests)

    def cancel(
        self, requests: Sequence[Request], reason: FinishReason = "cancelled", error: BaseException | None = None
    ) -> None:
        """End requests before the next step."""
        with self._changed:
            if self.turns.resting:
                self._end(None, requests, reason, error)
            elif requests and not self.closed:
                self._inbox.send(lambda loop: self._end(loop, requests, reason, error))

    @property
    def open(self) -> bool:
        """Whether it takes requests, in this process."""
        return not self.closed and self.turns.in_this_process

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
            while self.turns.begin(done):
                try:
                    self._run(lambda: bool(done() or self.turns.pausing))
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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no thread run the loop for the block, once the step that it is in has been launched and read.

        Raises:
            RuntimeError: this thread runs it, or it belongs to another process.
        """
        self.turns.pause()
        try:
            if self.loop is not None:
                with self._runtime.loop_lock.taken():
                    self._inbox.deliver(self.loop)
                    self.drain(self.loop)
            yield
        finally:
            self._leave()

    def _receive_unless_running(self) -> None:
        """Take messages, unless somebody runs the loop, who takes them."""
        if not (self._inbox and self.turns.begin_if_free()):
            return
        try:
            if self.loop is not None:
                with self._runtime.loop_lock.taken():
                    self._inbox.deliver(self.loop)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._runtime.loop_lock.claim_pages(self, None)
        self.turns.leave()

    def start_thread(self) -> None:
        """Let a thread of our own run the loop while there are requests."""
        with self._changed:
            if self._thread is None:
                self._thread = serving_thread(self, self._inbox)
                self._thread.start()

    def serve(self) -> None:
        """Run the loop until no request is left, or the model falls asleep."""

        def done() -> bool:
            busy = self._inbox or self._parked or (self.loop is not None and not self.loop.idle)
            return self.closed or self.turns.resting or not busy

        self.run(done)

    def close(self) -> None:
        """End all requests and give everything back; nothing is run afterwards."""
        with self.paused(), self._runtime.loop_lock.taken():
            self.closed = True
            self._inbox.close()
            self._end(self.loop, list(self.handles), "cancelled")
            self._drop_loop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.handles.output.close()

    # ---- in the thread that runs it

    def _run(self, done: Callable[[], bool]) -> None:
        while not done():
            try:
                loop = self._current_loop()
            except Exception as error:  # the model is where it cannot run, or there is no memory for its pages
                with self._runtime.loop_lock.taken():
                    self._give_up(error)
                continue
            if loop.idle:
                self._inbox.deliver(loop)
            if loop.idle:
                del loop  # while nothing runs, nobody here holds device memory
                with self._changed:
                    self.turns.wait_until(lambda: self._inbox or done())
                continue
            with self._runtime.loop_lock.taken():
                self._work(loop, done)
            loop.rest(lambda: self._inbox or self.turns.pausing)
            self.check.forget()  # whoever waited for what has ended may change it now
            pause = self._shortage.pause(loop)
            del loop
            if pause:
                time.sleep(pause)

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
        self._notify(loop.read_first_tokens())
        self._inbox.deliver(loop)
        looked = self.check.look_if_due(loop.device_model)
        if looked and loop.prefixes is not None and loop.device_model.watch.changed():
            loop.prefixes.clear()
        self._notify(loop.scheduler.expire(time.monotonic()))
        lock, scheduler = self._runtime.loop_lock, loop.scheduler
        scheduler.lets_pass, scheduler.admits_until = self._shortage.lasting, lock.pages_wanted_since(apart_from=self)
        self._notify(loop.step(unchanged=not looked))
        # If nobody else runs who could give pages back, caches have them, and others may well fit.
        lock.claim_pages(self, scheduler.short_since if scheduler.running or lock.shared else None)

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
        lost = restarted(loop, error)
        self.check.forget()
        if lost is not None:
            self._give_up(lost)
        elif isinstance(error, Exception):
            logger.error("compiled_llm: requests that failed: %d, of %s: %s", len(failed), type(error).__name__, error)
            if not self._runtime.is_current(loop.device_model):
                error.__traceback__ = None  # who keeps the error would keep the old device side
            self._end(loop, failed, "error", error)

    def _give_up(self, error: Exception) -> None:
        """End all requests; there is no loop to run them, or no device any more, to which nothing is given back."""
        if (lost := device_lost(error)) is not None:
            self.check.lose(lost)
        self._inbox.clear()
        self._parked.clear()
        self._end(self.loop if lost is None else None, list(self.handles), "error", lost or error)
        self._drop_loop(gives_back=lost is None)

    def _end(
        self, loop: Loop | None, requests: Sequence[Request], reason: FinishReason, error: BaseException | None = None
    ) -> None:
        """End requests, which no loop knows yet if it is None."""
        for request in requests:
            if loop is not None:
                loop.scheduler.end(request, reason, error)
            elif not request.done:
                request.finish_reason, request.error = reason, error
        self._notify(requests)

    def _notify(self, changed: Sequence[Request]) -> None:
        """Tell whoever waits for these requests."""
        if self.handles.notify(changed):  # nobody waits here for a token
            with self._changed:
                self._changed.notify_all()

    def _current_loop(self) -> Loop:
        """Return the loop on the model as it is placed now; requests that run stay with theirs, and end there."""
        if self.loop is None or self.loop.idle:
            device_model = self.check.begin()  # lets an old one go first
            if self.loop is None or self.loop.device_model is not device_model:
                self._drop_loop()
                device_model.prefixes.clear()  # who knows of which weights they are
                self.loop = Loop.of(device_model, self._settings)
                while self._parked:
                    self.loop.scheduler.add(self._parked.pop(0))
        return self.loop

    def _drop_loop(self, gives_back: bool = True) -> None:
        """Give all pages back, and hold the device side no more; what has been counted stays."""
        if self.loop is not None:
            self._past = stats_of(self.loop, 0, self._past)
            if gives_back:
                self.loop.close()
            self.loop = None

    def stats(self) -> EngineStats:
        """Return what has happened so far."""
        return stats_of(self.loop, self.waiting, self._past)

    # ---- asleep, while the loop is paused

    def park(self) -> None:
        """Have no loop; what runs and waits goes on in the next one. The caller holds the loop lock."""
        if self.loop is not None:
            self._parked += self.loop.scheduler.park()
            self._drop_loop()

    def rest(self, ends: bool) -> None:
        """Run nothing until ``go_on``; if ``ends``, nothing is left that could."""
        self.check.forget()
        with self._changed:
            self.turns.resting = True
            if ends:
                self._end(None, list(self.handles), "cancelled")

    def go_on(self) -> None:
        """Run what waits."""
        with self._changed:
            self.turns.resting = False
            self._inbox.call()

    # ---- used by the runtime

    def let_go(self) -> None:
        """Hold the device side no more, which is about to be made anew; unless requests run on it, which then end."""
        with self._changed:
            if not self.turns.elsewhere and self.loop is not None and self.loop.idle:
                self._drop_loop()
                self.check.forget()

    def forget_other_threads(self) -> bool:
        """End in a forked process, which has none of its threads; whether requests had pages."""
        had_pages = self.loop is not None and bool(self.loop.scheduler.running)
        self._inbox.forget_other_threads()
        self._changed, self._thread = self._inbox.changed, None
        self.turns.forget_other_threads(self._changed)
        self.handles.forget_other_threads()
        self._parked.clear()
        self.loop = None
        return had_pages

    def give_back(self, pages: int, pool: PagePool) -> None:
        """Let requests that run wait again until so many pages are available; the caller holds the loop lock."""
        loop = self.loop
        if loop is not None and loop.device_model.pool is pool and loop.scheduler.running:
            self.drain(loop)
            while loop.scheduler.running and pages > pool.available:
                loop.scheduler.preempt()
