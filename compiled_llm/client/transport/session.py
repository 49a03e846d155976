"""A client's connection from the first word to the end, and what comes of it; if it is lost, another one follows."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable

from msgspec import Struct

from compiled_llm.client.columns import column_of
from compiled_llm.client.errors import EngineDeadError, EngineProcessError, refusal
from compiled_llm.client.transport.connection import Line
from compiled_llm.protocol.messages import (
    FromEngine,
    Leaving,
    Piece,
    Preparing,
    Problem,
    PromptTokens,
    Ready,
    Refused,
    Reply,
    StatsReply,
    StepUpdates,
    Summary,
    TextReply,
    TokensReply,
)
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.listeners import Listeners, tell
from compiled_llm.requests.outputs import Figures

_PAUSE = 0.05  # seconds between two tries to connect


class ClientSession:
    """A client's requests: brings what an engine process says to the threads and tasks that wait for it."""

    def __init__(self) -> None:
        self.listeners = Listeners()
        self.heard = 0
        self.preparing = Preparing("starting")
        self.ready: Ready | None = None
        self.unready_since: float | None = None
        self.lost: EngineDeadError | None = None
        self.loss_reported = self.closed = False
        self._line: Line | None = None
        self._said: str | None = None  # why the engine process ends
        self._numbers = itertools.count(1)
        self._changing = threading.Lock()
        self._handles: dict[int, RequestHandle] = {}
        self._questions: dict[int, Reply | Exception | None] = {}  # and their answers

    @property
    def doing(self) -> str:
        """``"ready"``, or what the engine process does before, in words."""
        return self.preparing.doing if self.ready is None else "ready"

    @property
    def progress(self) -> tuple[int, int] | None:
        """Which step of how many the engine process is at before it is ready; None if they are not counted."""
        step, steps = self.preparing.step, self.preparing.steps
        return None if self.ready is not None or step is None or steps is None else (step, steps)

    # ---- the connection

    def connect(self, dial: Callable[[], Line], seconds: float = 0.0) -> None:
        """Connect by ``dial``, within ``seconds`` in which an engine process may begin, and read what comes."""
        deadline = time.monotonic() + seconds
        while self._line is None:
            try:
                self._line = dial()
            except EngineDeadError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE)
        self._line.start(self.take, self.connection_lost)

    @property
    def line(self) -> Line:
        assert self._line is not None, "it was not connected"
        return self._line

    def send(self, message: Struct) -> None:
        self.line.send(message)

    def check_may_wait(self) -> None:
        """Raise RuntimeError if nothing would come while this thread waits."""
        self.line.check_may_wait()

    @property
    def broken(self) -> bool:
        """Whether the other side has ended it, and another one may follow."""
        return self.lost is not None and not self.closed and (self.loss_reported or self.ready is not None)

    def close(self) -> None:
        self.closed = True
        self.lost = self.lost or EngineDeadError("the client is closed; make another one")
        if self._line is not None:
            self._line.close()

    # ---- requests and questions

    def number(self) -> int:
        return next(self._numbers)

    def ask(self, question: Callable[[int], Struct]) -> int:
        """Send a question, which is made with its number, and return that number."""
        number = self.number()
        self._questions[number] = None
        self.send(question(number))
        return number

    def check(self) -> None:
        """Raise EngineDeadError if the engine process is gone."""
        if self.lost is not None:
            self.loss_reported = True
            raise self.lost

    def check_ready(self) -> Ready:
        """Return what the engine process has said of its model; EngineProcessError if it is gone or not ready."""
        self.check()
        if self.ready is None:
            raise EngineProcessError(f"the engine process is not ready ({self.doing}); wait_until_ready() waits for it")
        return self.ready

    def expect(self, number: int, handle: RequestHandle) -> None:
        """Let a handle take what comes for a request, which is about to be sent; EngineDeadError if nothing will."""
        with self._changing:
            self.check()
            self._handles[number] = handle

    def forget(self, number: int) -> None:
        self._handles.pop(number, None)
        self._questions.pop(number, None)

    def has_answered(self, number: int) -> bool:
        """Whether a question has its answer, or never will have."""
        return self._questions[number] is not None or self.lost is not None

    def reply(self, number: int) -> Reply:
        """Return the answer to a question; if it was refused, that error, and EngineDeadError if nothing comes."""
        answer = self._questions[number]
        if answer is None:
            self.check()
        assert answer is not None, "it has no answer yet"
        if isinstance(answer, Exception):
            raise answer
        return answer

    # ---- in the thread that reads the connection

    def take(self, messages: Iterable[FromEngine]) -> None:
        """Take messages, then wake the threads and tasks that wait for them."""
        self.heard += 1
        changed: dict[RequestHandle, bool] = {}  # requests that have something new, and whether an answer has ended
        told = []
        for message in messages:
            if isinstance(message, StepUpdates):
                self._take_step(message, changed)
            else:
                told = [self.listeners]
                changed |= dict.fromkeys(self._take_message(message), True)
        for handle, has_ended in changed.items():
            if handle.has_text:
                handle.read_text()
            told.append(handle.listeners)
            if has_ended:
                told.append(handle.end_listeners)
        tell(told)

    def _take_step(self, step: StepUpdates, changed: dict[RequestHandle, bool]) -> None:
        """Take the new tokens of requests, and note whose these are."""
        for update in step.updates:
            if (handle := self._handles.get(update.request)) is None:  # it was refused in the end
                continue
            record, ended = handle.requests[update.index], update.ended
            if update.columns is not None:
                for name, data in update.columns.items():
                    column_of(record, name).take(data)
            record.tokens.extend(update.tokens)
            if ended is not None:
                record.stop_reason = ended.stop_reason
                record.error = None if ended.error is None else refusal(ended.kind, ended.error)
                record.finish_reason = ended.finish_reason  # last: a thread that sees it finds the rest
            changed[handle] = ended is not None or changed.get(handle, False)
        for summary in step.summaries:
            if (handle := self._handles.pop(summary.request, None)) is not None:
                handle.finish(_figures(summary))
                changed[handle] = True

    def _take_message(self, message: FromEngine) -> Iterable[RequestHandle]:
        """Take one message that is no step's, and return the requests that it says something of."""
        match message:
            case PromptTokens() if (handle := self._handles.get(message.request)) is not None:
                handle.prompt = message.tokens
            case Piece() if (handle := self._handles.get(message.request)) is not None:
                column_of(handle.requests[message.index], message.column).take_piece(message.data)
                return [handle]
            case Refused() if message.request in self._questions:
                self._questions[message.request] = refusal(message.kind, message.message)
            case Refused() if (handle := self._handles.pop(message.request, None)) is not None:
                _fail(handle, refusal(message.kind, message.message))
                return [handle]
            case StatsReply() | TokensReply() | TextReply() if message.number in self._questions:
                self._questions[message.number] = message
            case Preparing():
                if self.ready is not None:  # it sleeps now
                    self.unready_since = time.monotonic()
                self.preparing, self.ready = message, None
            case Ready():
                self.ready, self.unready_since = message, None
            case Leaving() | Problem():
                self._said = message.message
        return []

    def connection_lost(self, error: EngineDeadError) -> None:
        """End all requests: nothing more comes."""
        if self._said is not None:
            error = EngineDeadError(f"the engine process has ended the connection: {self._said}")
        with self._changing:
            self.lost = self.lost or error
        self._fail_all(self.lost)

    def give_up(self, error: EngineProcessError) -> None:
        """End all requests and questions: nothing comes now. The engine process ends them when it reads again."""
        for handle in tuple(self._handles.values()):
            handle.cancel()
        self._questions = {number: answer or error for number, answer in self._questions.items()}
        self._fail_all(error)

    def _fail_all(self, error: EngineProcessError) -> None:
        with self._changing:
            handles = list(self._handles.values())
            self._handles.clear()
        for handle in handles:
            _fail(handle, error)
            handle.read_text()
        ended = [handle.listeners for handle in handles] + [handle.end_listeners for handle in handles]
        tell([self.listeners, *ended])


def _figures(summary: Summary) -> Figures:
    return Figures(
        cached_tokens=summary.cached_tokens,
        queue_seconds=summary.queue_seconds,
        first_token_seconds=summary.first_token_seconds,
        seconds=summary.seconds,
    )


def _fail(handle: RequestHandle, error: Exception) -> None:
    """End what has not ended: the engine process has ended the whole request, or nothing more comes of it."""
    for record in handle.requests:
        if not record.done:
            record.error, record.finish_reason = error, "error"
    seconds = time.monotonic() - handle.submitted
    figures = Figures(cached_tokens=0, queue_seconds=None, first_token_seconds=None, seconds=seconds)
    handle.finish(figures, refused=error)
