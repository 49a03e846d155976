"""Runs the loop in one thread at a time: that of a caller waiting for answers, or the engine's own."""

# Requests come in as messages, which the thread that runs the loop takes between two steps; no other thread writes the
# loop's state.

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from compiled_llm.engine.device_loss import device_lost, restarted
from compiled_llm.engine.input_processing.input_processor import check_queue
from compiled_llm.engine.loop_settings import LoopSettings
from compiled_llm.engine.model_check import ModelCheck
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.steps.request import Request, RequestError
from compiled_llm.engine.steps.taps import engine_taps
from compiled_llm.engine.thread.arrivals import Arrivals
from compiled_llm.engine.thread.gc_thresholds import gc_thresholds
from compiled_llm.engine.thread.joined_calls import JoinedCalls
from compiled_llm.engine.thread.placed_loop import PlacedLoop
from compiled_llm.engine.thread.request_table import RequestTable
from compiled_llm.engine.thread.serving import ServingThread
from compiled_llm.engine.thread.starvation import Starvation
from compiled_llm.engine.thread.step_lock import StepLock
from compiled_llm.execution.lifecycle.runtime import Runtime
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.kvcache.pool import PagePool
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.outputs import FinishReason
from compiled_llm.requests.users_code import described, failure_of

logger = logging.getLogger("compiled_llm.engine")


class EngineThread:
    """The thread that runs the loop of one engine."""

    # The loop's knowledge of rows and pages changes only under the model's loop lock, in the thread that runs it or in
    # a call that lacks pages (``give_back``).

    def __init__(self, model: PreTrainedModel, runtime: Runtime, settings: LoopSettings) -> None:
        self._runtime = runtime
        self.check = ModelCheck(model, runtime, settings.watch_model)
        self.placed = PlacedLoop(self.check, settings)
        self.closed = False
        self._starvation = Starvation()
        self._arrivals = Arrivals()
        self._changed = self._arrivals.changed
        self.request_table = RequestTable(self._arrivals)
        self.step_lock = StepLock(self._changed)
        self.joined = JoinedCalls(self._changed)
        self._due = 0.0  # when the next step has more to do than to run
        self._claimed: float | None = None  # since when other loops get no pages
        weakref.finalize(self, self._arrivals.close).atexit = False
        self._serving = ServingThread(self, self._arrivals)

    # ---- messages, from any thread

    def add(self, handles: Sequence[RequestHandle], max_waiting: int | None = None) -> None:
        """Let requests wait for their turn; those that are not ``ready`` have to ``arrive`` later.

        Raises:
            RuntimeError: the engine is closed, or asleep.
            QueueFullError: more than ``max_waiting`` would wait; none was added.
            ValueError: the host has too little memory for their hidden states; none was added.
        """
        requests = {request: handle for handle in handles for request in handle.requests}
        with self._changed:
            self.check.check_awake()
            check_queue(self.waiting, len(requests), max_waiting)
            for tap in engine_taps():
                tap.check_room(requests, list(self.request_table))
            self.request_table.paused_requests.arrive([request for request in requests if request.ready])
            self.request_table.update(requests)

    def cancel(
        self, requests: Sequence[Request], reason: FinishReason = "cancelled", error: BaseException | None = None
    ) -> None:
        """End requests before the next step."""
        with self._changed:
            if self.step_lock.resting:
                self.request_table.end(None, requests, reason, error)
            elif requests and not self.closed:
                self._arrivals.send(lambda loop: self.request_table.end(loop, requests, reason, error))

    @property
    def loop(self) -> Loop | None:
        return self.placed.loop

    @property
    def waiting(self) -> int:
        """The number of requests that have not begun to run, or run no more."""
        return len(self.request_table) - (0 if self.loop is None else len(self.loop.scheduler.running))

    # ---- one thread at a time

    def run(self, done: Callable[[], bool]) -> None:
        """Run the loop in this thread until ``done``, or wait while another runs it; RuntimeError if paused."""
        # ``done`` is asked again when the engine's state has changed, as when a request has ended.
        # Without gradients, as ``generate``: each step would have to leave that world otherwise.
        with deferred(), torch.no_grad():
            while self.step_lock.begin(done):
                try:
                    self._run(lambda: bool(done() or self.step_lock.pausing))
                finally:
                    self._leave()

    def answer(self, handles: Sequence[RequestHandle]) -> None:
        """Run the loop in this thread until these have ended; an interrupt ends them."""
        remaining = list(handles)

        def ended() -> bool:  # a handle that has ended is not asked again
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
    def paused(self, patience: float = math.inf) -> Iterator[bool]:
        """Let no thread run the loop for the block, once the present step is read; RuntimeError if this one runs it."""
        # Yields False if another thread has had the loop for ``patience`` seconds; it then runs on.
        if not self.step_lock.pause(patience):
            yield False
            return
        try:
            if self.loop is not None:
                with self._runtime.loop_lock.taken():
                    self._arrivals.deliver(self.loop)
                    self.drain(self.loop)
            yield True
        finally:
            self._leave()

    def _receive_unless_running(self) -> None:
        """Take messages, unless another thread runs the loop, which takes them."""
        if not (self._arrivals and self.step_lock.begin_if_free()):
            return
        try:
            if self.loop is not None:
                with self._runtime.loop_lock.taken():
                    self._arrivals.deliver(self.loop)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._claim_pages(None)
        self.step_lock.leave()
        if self._arrivals or self.placed.busy:  # of other threads: the engine's own goes on with them
            self._arrivals.call()

    def start_thread(self) -> None:
        """Let a thread of our own run the loop while there are requests."""
        with self._changed:
            self._serving.start()

    def serve(self) -> None:
        """Run the loop until no request is left, or the model falls asleep."""

        def done() -> bool:
            return self.closed or self.step_lock.resting or not (self._arrivals or self.placed.busy)

        self.run(done)

    def close(self) -> None:
        """End all requests and give everything back; nothing is run afterwards."""
        self.joined.end()
        with self.paused(), self._runtime.loop_lock.taken():
            self.closed = True
            self._arrivals.close()
            self.request_table.end(self.loop, list(self.request_table), "cancelled")
            self.placed.drop()
        self._serving.join()
        self.request_table.output.close()

    # ---- in the thread that runs it

    def _run(self, done: Callable[[], bool]) -> None:
        while not done():
            try:
                self._turn(done)
            except BaseException as error:  # the model cannot run where it is, or its pages have no memory
                if self._interrupts(error):
                    raise
                with self._runtime.loop_lock.taken():
                    self._give_up(error)

    def _turn(self, done: Callable[[], bool]) -> None:
        """Run steps while there is something to run, or wait until there is."""
        loop = self.placed.current()
        if loop.idle:
            self._arrivals.deliver(loop)
        if loop.idle:
            del loop  # while nothing runs, this frame must not hold device memory
            with self._changed:
                self.step_lock.wait_until(lambda: self._arrivals or done())
            return
        with self._runtime.loop_lock.taken(), gc_thresholds.raised():
            self._work(loop, done)
        self._rest(loop)
        self.check.forget()  # the model may change now that requests have ended
        pause = self._starvation.pause(loop)
        del loop
        if pause:
            time.sleep(pause)

    def _rest(self, loop: Loop) -> None:
        """Let a loop prepare what it has missed; a failure there ends no request, unless the device is lost."""
        try:
            loop.rest(lambda: self._arrivals or self.step_lock.pausing)
        except BaseException as error:
            if self._interrupts(error) or device_lost(error) is not None:
                raise
            logger.error("compiled_llm: an idle engine has failed, of %s", described(error), exc_info=error)

    def _work(self, loop: Loop, done: Callable[[], bool]) -> None:
        """Run steps while there is something to run."""
        # A loop that is stuck has no pages, and returns: others may wait until no loop has any.
        lock, loop.stuck, self._changed.seen = self._runtime.loop_lock, False, False
        loop.scheduler.lets_pass = self._starvation.lasting
        while not loop.stuck:
            try:
                if not self._step(loop, done):
                    break
            except BaseException as error:
                self._changed.seen = False
                self._recover(loop, error)
            if lock.waiters and not loop.stuck:
                with lock.yielded():
                    time.sleep(0)
                self._changed.seen = False  # another loop may have checked the model, or claim pages
        if loop.stuck and self._starvation.lasting and (lacking := loop.scheduler.lacks_states):
            self._refuse_waiting(loop, lacking)

    @property
    def _engines(self) -> list[EngineThread]:
        return [engine for engine in list(self._runtime.engines) if isinstance(engine, EngineThread)]

    def _refuse_waiting(self, loop: Loop, lacking: str) -> None:
        """End all requests, none of which can begin, if no row that runs will give states back."""
        # What is left are rows of caches that the user keeps. The prefix tree has given up what it had.
        run = any(engine.loop is not None and engine.loop.scheduler.rows for engine in self._engines)
        if run or self._runtime.loop_lock.shared:
            return
        self._starvation = Starvation()
        waiting = loop.scheduler.waiting
        logger.error("compiled_llm: %d requests are refused: %s", len(waiting), lacking)
        self.request_table.end(loop, waiting, "error", RequestError(lacking))

    def _step(self, loop: Loop, done: Callable[[], bool]) -> bool:
        """Run a step, and before it what is due; False if there is nothing to run."""
        if loop.ran_prompts and (first := loop.read_first_tokens()):
            self.request_table.notify(first)
        if loop.timing and self._changed.seen and (due := loop.due):
            self._changed.wait_before(due)
        checked = False
        if not self._changed.seen or time.monotonic() >= self._due:
            self._changed.seen = True  # first: what changes from now on is seen before the next step
            if done() or loop.idle:
                return False
            checked = self._attend(loop)
        self.request_table.notify(loop.step(checked))
        scheduler, lock = loop.scheduler, self._runtime.loop_lock
        # If no other loop runs that could give pages back, caches have them, and other requests may fit.
        short_since = scheduler.short_since
        if short_since is not None and not (scheduler.running or lock.shared):
            short_since = None
        if short_since != self._claimed:
            self._claim_pages(short_since)
        return True

    def _attend(self, loop: Loop) -> bool:
        """Take messages, and do what the time has come for; return whether the model was checked."""
        self._arrivals.deliver(loop)
        checked, scheduler = self.check.check_if_due(loop.model_runner), loop.scheduler
        if scheduler.next_deadline <= (now := time.monotonic()):
            self.request_table.notify(scheduler.expire(now))
        scheduler.admission_deadline = self._runtime.loop_lock.pages_wanted_since(apart_from=self)
        if (compiling := loop.model_runner.compiling) is not None:  # it waits for answers that have begun
            until = compiling.admission_deadline
            if scheduler.running or scheduler.next_goes_on(until):
                scheduler.admission_deadline = min(scheduler.admission_deadline, until)
        self._due = min(self.check.due, scheduler.next_deadline)
        if scheduler.idle or scheduler.admission_deadline < math.inf:  # nobody tells that all is read, or pages taken
            self._changed.seen = False
        return checked

    def _claim_pages(self, since: float | None) -> None:
        self._claimed = since
        self._runtime.loop_lock.claim_pages(self, since)

    def model_may_have_changed(self, weights_stay: bool) -> None:
        """Check the model before the next step; unless its weights stay, empty the prefix cache."""
        self.check.forget()
        if (present := self._runtime.runner_lifecycle.present) is not None and not weights_stay:
            present.prefixes.clear()
            for engine in self._engines:  # those that run check it, too
                engine._changed.seen = False

    def drain(self, loop: Loop) -> None:
        """Read the tokens of the last step that was launched; if that fails, all that runs has failed."""
        try:
            self.request_table.notify(loop.drain())
        except BaseException as error:
            self._restart(loop, error)
            if self._interrupts(error):
                raise

    def _recover(self, loop: Loop, error: BaseException) -> None:
        """Restart after a step that failed, having read the one before it if possible; raise an interrupt."""
        if not self._interrupts(error):
            try:
                self.request_table.notify(loop.drain())
            except BaseException as another:  # the first error says more, unless the device is lost or this is Ctrl-C
                if self._interrupts(another) or device_lost(another) is not None:
                    error = another
        self._restart(loop, error)
        if self._interrupts(error):
            raise error

    def _restart(self, loop: Loop, error: BaseException) -> None:
        """Restart after a step that failed: unless this thread was interrupted, the requests that ran fail with it."""
        # If nothing ran, nothing can: then all have failed.
        failed = loop.underway or list(self.request_table)
        lost = restarted(loop, error)
        self.check.forget()
        if lost is not None:
            self._give_up(lost)
        elif not self._interrupts(error):
            logger.error("compiled_llm: requests that failed: %d, of %s", len(failed), described(error))
            if not self._runtime.is_current(loop.model_runner):
                error.__traceback__ = None  # it would keep the old model runner alive
            self.request_table.end(loop, failed, "error", failure_of(error))

    def _interrupts(self, error: BaseException) -> bool:
        """Whether an error is meant for the caller in whose thread the loop runs, as Ctrl-C is."""
        return not isinstance(error, Exception) and not self._serving.here

    def fail(self, error: BaseException) -> None:
        """End all requests: the engine's own thread has failed outside of the loop."""
        logger.error("compiled_llm: the engine's thread has failed, of %s", described(error), exc_info=error)
        if self.step_lock.here:
            self._leave()
        self.step_lock.pause()
        try:
            with self._runtime.loop_lock.taken():
                self._give_up(error)
        finally:
            self._leave()

    def _give_up(self, error: BaseException) -> None:
        """End all requests: no loop can run them. A lost device is given nothing back."""
        if (lost := device_lost(error)) is not None:
            self.check.refuse_all(lost)
        with self._changed:  # a request that comes now is in neither or in both
            self._arrivals.clear()
            requests, failure = list(self.request_table), lost or failure_of(error)
        logger.error("compiled_llm: all requests have failed, %d, of %s", len(requests), described(error))
        try:
            self.request_table.end(self.loop if lost is None else None, requests, "error", failure)
            self.placed.drop(gives_back=lost is None)
        finally:  # also if the loop can no more
            self.placed.forget()
            self.request_table.end(None, requests, "error", failure)

    # ---- asleep, while the loop is paused

    def sleep(self, ends: bool) -> None:
        """Run nothing until ``wake``; if ``ends``, end all requests."""
        self.check.forget()
        with self._changed:
            self.step_lock.resting = True
            if ends:
                self.request_table.end(None, list(self.request_table), "cancelled")

    def wake(self) -> None:
        with self._changed:
            self.step_lock.resting = False
            self._arrivals.call()

    # ---- used by the runtime

    def let_go(self) -> None:
        """Drop the model runner, which is about to be made again, unless requests run on it; those then end."""
        with self._changed:
            if not self.step_lock.elsewhere and self.loop is not None and self.loop.idle:
                self.placed.drop()
                self.check.forget()

    def give_back(self, pages: int, rows: int, pool: PagePool) -> None:
        """Let running requests wait until so many pages, and states, are available; the caller holds the loop lock."""
        loop = self.loop
        if loop is not None and loop.model_runner.pool is pool and loop.scheduler.running:
            self.drain(loop)
            while loop.scheduler.running and pool.lacks(pages, rows):
                loop.scheduler.preempt()
