"""What a client knows of its engine process: whether it is ready, and the requests and questions under way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable

from compiled_llm.client.errors import EngineDeadError, EngineProcessError, refusal
from compiled_llm.client.handle import RemoteHandle
from compiled_llm.protocol.messages import (
    FromEngine,
    Leaving,
    Preparing,
    Problem,
    PromptScores,
    Ready,
    Refused,
    StatsReply,
    StepUpdates,
)
from compiled_llm.requests.listeners import Listeners, tell


class ClientSession:
    """Brings what an engine process says to whoever waits for it.

    Attributes:
        listeners: told when the engine process is ready, has answered a question, or is gone.
        heard: how often something has come of it; its heartbeat comes every few seconds.
        doing: what the engine process does before it is ready, in words.
        ready: what it has said when it was; None while it is not.
        lost: why nothing more comes; None while something may.
        told: whether somebody has heard of that.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.listeners = Listeners()
        self.heard = 0
        self.doing = "starting"
        self.ready: Ready | None = None
        self.lost: EngineDeadError | None = None
        self.loss_reported = False
        self._said: str | None = None  # why the engine process ends
        self._numbers = itertools.count(1)
        self._changing = threading.Lock()
        self._handles: dict[int, RemoteHandle] = {}
        self._questions: dict[int, StatsReply | Exception | None] = {}  # and their answers

    def number(self) -> int:
        """Return a number for a request that no other has."""
        return next(self._numbers)

    def ask(self) -> int:
        """Return a number for a question, which is about to be sent."""
        number = self.number()
        self._questions[number] = None
        return number

    def check(self) -> None:
        """Check that the engine process is there.

        Raises:
            EngineDeadError: it is not.
        """
        if self.lost is not None:
            self.loss_reported = True
            raise self.lost

    def check_ready(self) -> Ready:
        """Return what the engine process has said of its model.

        Raises:
            EngineDeadError: it is gone.
            EngineProcessError: it takes no requests yet.
        """
        self.check()
        if self.ready is None:
            raise EngineProcessError(f"the engine process is not ready ({self.doing}); wait_until_ready() waits for it")
        return self.ready

    def expect(self, number: int, handle: RemoteHandle) -> None:
        """Let a handle take what comes for a request, which is about to be sent.

        Raises:
            EngineDeadError: nothing will come.
        """
        with self._changing:
            self.check()
            self._handles[number] = handle

    def forget(self, number: int) -> None:
        """Expect nothing for a request or a question: it could not be sent, or nobody waits any more."""
        self._handles.pop(number, None)
        self._questions.pop(number, None)

    # ---- what is waited for

    def is_decided(self) -> bool:
        """Whether the engine process takes requests, or never will."""
        return self.ready is not None or self.lost is not None

    def not_ready_after(self, timeout: float | None) -> TimeoutError:
        """Return what is raised if it is not decided in time."""
        return TimeoutError(f"the engine process is not ready after {timeout} s: {self.doing}")

    def has_answered(self, number: int) -> bool:
        """Whether a question has its answer, or never will have."""
        return self._questions[number] is not None or self.lost is not None

    def no_answer_after(self, timeout: float | None) -> TimeoutError:
        """Return what is raised if there is no answer in time."""
        return TimeoutError(f"the engine process has not answered for {timeout} s")

    def stats(self, number: int) -> StatsReply:
        """Return the answer to a question.

        Raises:
            EngineProcessError: the engine process takes no questions now, or is gone.
        """
        answer = self._questions[number]
        if isinstance(answer, StatsReply):
            return answer
        self.check()
        assert answer is not None, "nobody has answered"
        raise answer

    # ---- in the thread that reads the connection

    def take(self, messages: Iterable[FromEngine]) -> None:
        """Take messages, then wake whoever waits for what they say."""
        self.heard += 1
        changed: dict[RemoteHandle, None] = {}
        for message in messages:
            changed.update(dict.fromkeys(self._taken(message)))
        for handle in changed:
            if handle.has_text:
                handle.read_text()
        tell([self.listeners, *(handle.listeners for handle in changed)])

    def _taken(self, message: FromEngine) -> Iterable[RemoteHandle]:
        """Take one message, and return the requests that it says something of."""
        match message:
            case StepUpdates():
                return self._step(message)
            case PromptScores() if (handle := self._handles.get(message.request)) is not None:
                handle.take_prompt_scores(message.logprobs)
                return [handle]
            case Refused() if message.request in self._questions:
                self._questions[message.request] = refusal(message.kind, message.message)
            case Refused() if (handle := self._handles.pop(message.request, None)) is not None:
                handle.fail(refusal(message.kind, message.message))
                return [handle]
            case StatsReply() if message.number in self._questions:
                self._questions[message.number] = message
            case Preparing():
                self.doing, self.ready = message.doing, None  # it was, and sleeps now
            case Ready():
                self.doing, self.ready = "ready", message
            case Leaving() | Problem():
                self._said = message.message
        return []

    def _step(self, step: StepUpdates) -> list[RemoteHandle]:
        changed = []
        for update in step.updates:
            if (handle := self._handles.get(update.request)) is not None:  # none, if it was refused in the end
                changed.append(handle)
                handle.take(update)
        for summary in step.summaries:
            if (handle := self._handles.pop(summary.request, None)) is not None:
                changed.append(handle)
                handle.finish(summary)
        return changed

    def lose(self, error: EngineDeadError) -> None:
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
            handle.fail(error)
            handle.read_text()
        tell([self.listeners, *(handle.listeners for handle in handles)])
