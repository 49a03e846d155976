"""``compiled_llm.client.Client``: an engine in another process, used as one in this."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from compiled_llm.client.connection import Connection
from compiled_llm.client.errors import GeneratorLostError
from compiled_llm.client.handle import RemoteHandle
from compiled_llm.client.plain import Prompt, plain_params, token_ids
from compiled_llm.client.session import Session
from compiled_llm.client.tokenizer import Given, tokenizer_of
from compiled_llm.engine.listeners import Listeners, tell
from compiled_llm.engine.output import RequestOutput
from compiled_llm.engine.params import SamplingParams
from compiled_llm.protocol.messages import AskStats, Cancel, Ready, Stats, Submit

if TYPE_CHECKING:  # what makes text imports torch
    from compiled_llm.engine.answer_text import TextFormat
    from compiled_llm.engine.detokenizer import Decoding


class Client:
    """Talks to a generator (``compiled-llm serve``) over its Unix socket, as one talks to an ``Engine``.

    Any thread may use it, and what ``submit`` returns works in any event loop. Closing it ends its requests.

    Examples:
        >>> client = Client("/run/llm.sock", tokenizer=True)  # doctest: +SKIP
        >>> outputs = client.generate(["Hello", "The capital of France is"])  # doctest: +SKIP
    """

    def __init__(self, path: str | Path, *, tokenizer: Given = None, wait: bool = True) -> None:
        """Connect to a generator.

        Args:
            path: of its socket.
            tokenizer: for prompts of text and messages, and for the text of answers: HuggingFace's, or anything with
                its ``decode``; a folder to load it from; or ``True`` for the one that the generator names. None for
                token ids alone, without which neither torch nor transformers is imported.
            wait: wait until the generator is ready, however long it has to load and compile.

        Raises:
            GeneratorLostError: there is no generator, or it ends before it is ready.
            GeneratorError: it does not want to talk to this client.
        """
        self._tokenizer_given = tokenizer
        self._session = Session()
        self._connection = Connection(path)
        self._connection.start(self._session.take, self._session.lose)
        self._close = weakref.finalize(self, _close, self._session, self._connection)
        if wait:
            self.wait_until_ready()

    def __repr__(self) -> str:
        """Whom it talks to."""
        return f"<{type(self).__name__}: {self._connection.path}, {self._session.lost or self._session.doing}>"

    # ---- the generator

    @property
    def doing(self) -> str:
        """What the generator does: what it loads or compiles before it takes requests, then ``"ready"``."""
        return self._session.doing

    def wait_until_ready(self, timeout: float | None = None) -> Ready:
        """Wait until the generator takes requests, and return what it says of its model.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.

        Raises:
            TimeoutError: it is not ready by then.
            GeneratorLostError: it has ended.
        """
        session = self._session
        if not session.listeners.wait_until(lambda: (session.ready or session.lost) is not None, timeout):
            raise TimeoutError(f"the generator is not ready after {timeout} s: {session.doing}")
        session.check()
        assert session.ready is not None
        return session.ready

    def stats(self, timeout: float | None = 60) -> Stats:
        """Ask how the generator is doing.

        Args:
            timeout: seconds to wait for the answer.

        Raises:
            GeneratorError: it is not ready, or is gone.
            TimeoutError: it has not answered by then.
        """
        self._session.check_ready()
        number = self._session.number()
        self._connection.send(AskStats(number))
        return self._session.wait_for_stats(number, timeout)

    # ---- requests

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answer prompts, and wait for all of them.

        An answer that fails by itself has the finish reason ``"error"`` and its ``error``; the others go on.

        Args:
            prompts: one, or several: token ids, text or chat messages.
            params: for all of them, or one for each.

        Returns:
            One output for each prompt, in their order.

        Raises:
            ValueError: a prompt or its settings are impossible; the others are ended.
            GeneratorBusyError: there are more than may wait; those that were taken are ended.
            GeneratorError: the generator takes no requests, or is gone.
        """
        listed: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(listed)
        if len(each) != len(listed):
            raise ValueError(f"params: give one for all prompts, or one for each of {len(listed)}; got {len(each)}")
        handles: list[RemoteHandle] = []
        try:
            handles += (self.submit(*entry) for entry in zip(listed, each, strict=True))
            _wait_for(handles)
            return [handle.output() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
    ) -> RemoteHandle:
        """Begin to answer a prompt, and return at once; whether the generator takes it, the handle tells.

        Args:
            prompt: token ids, text or chat messages.
            params: how to answer.
            priority: smaller ones run first.
            timeout: seconds after which it ends with what it has; None for never.
            cache_salt: only requests with an equal one read what this one leaves in the prefix cache.

        Raises:
            ValueError: the prompt or its settings cannot be sent.
            GeneratorError: the generator is not ready, or is gone.
        """
        params, session = params or SamplingParams(), self._session
        ready, number = session.check_ready(), session.number()
        ids = token_ids(prompt, self._tokenizer)
        submit = Submit(number, ids, plain_params(params), priority, timeout, cache_salt)
        handle = RemoteHandle(ids, params.n, _ends(params, ready), self._form(params), partial(self._cancel, number))
        session.expect(number, handle)
        try:
            self._connection.send(submit)
        except BaseException:
            session.forget(number)
            raise
        return handle

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> TextOfPrompt:
        """Answer a prompt, and give the text piece by piece with ``for`` or ``async for``.

        Whoever leaves the loop ends the request. Without a tokenizer, iterate over what ``submit`` returns: its tokens.

        Args:
            prompt: token ids, text or chat messages.
            params: how to answer.
            **options: others of ``submit``.

        Raises:
            ValueError: as of ``submit``; or there is no tokenizer, or there are several answers.
            GeneratorError: as of ``submit``.
        """
        return TextOfPrompt(self.submit(prompt, params, **options))

    def _cancel(self, number: int, index: int | None) -> None:
        self._connection.send(Cancel(number, index))

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_of(self._tokenizer_given, self.wait_until_ready())

    @cached_property
    def _decoding(self) -> Decoding | None:
        if self._tokenizer is None:
            return None
        from compiled_llm.engine.detokenizer import Decoding

        return Decoding(self._tokenizer)

    def _form(self, params: SamplingParams) -> TextFormat | None:
        if self._decoding is None:
            return None
        from compiled_llm.engine.answer_text import TextFormat

        return TextFormat.of(params, self._decoding)

    # ---- the end

    def close(self) -> None:
        """End the connection, and with it the client's requests. Closing it again does nothing."""
        self._close()

    def __enter__(self) -> Client:
        """Return the client; it is closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


class TextOfPrompt:
    """The text of an answer, piece by piece; a loop that is left ends the request.

    Attributes:
        handle: the request.
    """

    def __init__(self, handle: RemoteHandle) -> None:
        """Read the text of a request that has one answer."""
        self.handle = handle
        try:
            self._text = handle.text()
        except BaseException:
            handle.cancel()
            raise

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces as they come."""
        try:
            yield from self._text
        finally:
            self.handle.cancel()

    async def __aiter__(self) -> AsyncIterator[str]:
        """As ``__iter__``, for ``async for``."""
        try:
            async for piece in self._text:
                yield piece
        finally:
            self.handle.cancel()


def _close(session: Session, connection: Connection) -> None:
    session.lost = session.lost or GeneratorLostError("the client is closed; make another one")
    connection.close()


def _ends(params: SamplingParams, ready: Ready) -> frozenset[int]:
    """Return the tokens that end an answer, and have no text."""
    eos = [] if params.ignore_eos else ready.ends
    return frozenset([*(params.stop_token_ids or ()), *eos, *(ready.form_ends if params.structured_outputs else ())])


def _wait_for(handles: Sequence[RemoteHandle]) -> None:
    """Wait until all have ended.

    Raises:
        Exception: why one of them was refused, at once.
    """
    waiting, remaining = Listeners(), list(handles)

    def over() -> bool:  # asked after each step: who has ended is not asked again
        while remaining and remaining[-1].done and remaining[-1].refused is None:
            remaining.pop()
        return not remaining or any(handle.refused for handle in remaining)

    def tell_us() -> None:
        tell([waiting])

    for handle in handles:
        handle.when_changed(tell_us)
    waiting.wait_until(over)
    for handle in remaining:
        if handle.refused is not None:
            raise handle.refused


def _is_one(prompts: Any) -> bool:
    """Whether something is one prompt: text, a chat, or token ids."""
    if isinstance(prompts, (str, Mapping)) or not hasattr(prompts, "__len__"):
        return True
    if hasattr(prompts, "ndim"):
        return bool(prompts.ndim < 2)
    return len(prompts) > 0 and (isinstance(prompts[0], Mapping) or hasattr(prompts[0], "__index__"))
