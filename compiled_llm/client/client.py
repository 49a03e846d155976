"""``compiled_llm.client.Client``: an engine in another process, used as one in this."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from msgspec import Struct

from compiled_llm.client.base import BaseClient
from compiled_llm.client.plain import Prompt
from compiled_llm.client.tokenizer import Given
from compiled_llm.client.transport.connection import Line, ThreadConnection
from compiled_llm.client.transport.session import ClientSession
from compiled_llm.protocol.messages import Ready, Reply, StatsReply
from compiled_llm.requests.listeners import Listeners
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.sampling_params import SamplingParams

T = TypeVar("T")


class Client(BaseClient):
    """A client of an engine process (``compiled-llm serve``) over its Unix socket, with the methods of an ``Engine``.

    Any thread may use it, and what ``submit`` returns works in any event loop. Closing it ends its requests. If the
    engine process is lost, requests under way raise ``EngineDeadError``, and the next one connects again.

    Examples:
        >>> client = Client("/run/llm.sock", tokenizer=True)  # doctest: +SKIP
        >>> outputs = client.generate(["Hello", "The capital of France is"])  # doctest: +SKIP
    """

    def __init__(self, path: str | Path, *, tokenizer: Given = None, wait: bool = True) -> None:
        """Connect to an engine process, over its Unix socket at ``path``.

        Args:
            tokenizer: for prompts of text and messages, and for the text of answers: HuggingFace's, or anything with
                its ``decode``; a folder to load it from; or ``True`` for the one that the engine process names. None
                for token ids alone, without which neither torch nor transformers is imported.
            wait: wait until the engine process is ready, however long it has to load and compile.

        Raises:
            EngineDeadError: there is no engine process, or it ends before it is ready.
            EngineProcessError: it does not want to talk to this client.
        """
        super().__init__(path, tokenizer)
        self._connect()
        if wait:
            _finished(self._until_ready())

    def wait_until_ready(self, timeout: float | None = None) -> Ready:
        """Wait until the engine process takes requests, ``timeout`` seconds at most; return what it says of its model.

        Raises:
            TimeoutError: it is not ready by then.
            EngineDeadError: it has ended, and no other has taken its place within 5 seconds.
        """
        return _finished(self._wait_until_ready(timeout))

    def stats(self, timeout: float | None = 60) -> StatsReply:
        """Ask how the engine process is doing, and wait ``timeout`` seconds at most for the answer.

        Raises:
            EngineProcessError: it is not ready, or is gone.
            TimeoutError: it has not answered by then.
        """
        return _finished(self._stats(timeout))

    def ask(self, question: Callable[[int], Struct], timeout: float | None = 60) -> Reply:
        """Ask what ``question`` makes of a number, and wait for the answer; errors as of ``stats``, or ValueError."""
        return _finished(self._asked(question, timeout))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        hidden_states: Sequence[int] | None = None,
        emitted: Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Answer one prompt or several, and wait for all: one output each, in their order; arguments as of ``submit``.

        An answer that fails by itself has the finish reason ``"error"`` and its ``error``; the others go on.

        Args:
            params: for all of them, or one for each.

        Raises:
            ValueError: a prompt or its settings are impossible; the others are ended.
            EngineBusyError: there are more than may wait; those that were taken are ended.
            EngineProcessError: the engine process takes no requests, or is gone.
        """
        return _finished(self._generate(prompts, params, hidden_states=hidden_states, emitted=emitted))

    def _dial(self) -> Line:
        return ThreadConnection(self._path)

    async def _until(self, listeners: Listeners, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        return listeners.wait_until(ready, timeout)

    async def _apart(self, function: Callable[..., T], *arguments: object) -> T:
        return function(*arguments)

    def _session_to_use(self) -> ClientSession:
        self._reconnect()
        return self._session

    def __enter__(self) -> Client:
        """Return the client; it is closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of this client's, which waits in this thread and so ends in its first step."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("it waits for an event loop")
