"""What clients for threads and for event loops have in common: requests, which any thread and event loop can use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_llm.client.connection import Connection, Line
from compiled_llm.client.errors import GeneratorLostError
from compiled_llm.client.handle import RemoteHandle
from compiled_llm.client.plain import Prompt, plain_params, token_ids
from compiled_llm.client.session import Session
from compiled_llm.client.text_of_prompt import TextOfPrompt
from compiled_llm.client.tokenizer import Given, tokenizer_of
from compiled_llm.engine.params import SamplingParams
from compiled_llm.engine.several_prompts import with_params
from compiled_llm.protocol.messages import AskStats, Cancel, Ready, Submit

if TYPE_CHECKING:  # what makes text imports torch
    from compiled_llm.engine.answer_text import TextFormat
    from compiled_llm.engine.detokenizer import Decoding


class BaseClient:
    """Sends requests over a connection, and brings what comes of them to their handles."""

    def __init__(self, path: str | Path, tokenizer: Given) -> None:
        """Connect to nobody yet.

        Args:
            path: of the generator's socket.
            tokenizer: as the user gave it.
        """
        self._path = Path(path).expanduser()
        self._tokenizer_given = tokenizer
        self._session = Session()
        self._finalizer: weakref.finalize[..., BaseClient] | None = None

    def _connect(self) -> None:
        """Connect, say hello, and have what comes read from now on.

        Raises:
            GeneratorLostError: there is no generator.
            GeneratorError: it does not want to talk to this client.
        """
        self._connection = self._dial()
        self._connection.start(self._session.take, self._session.lose)
        self._finalizer = weakref.finalize(self, _close, self._session, self._connection)

    def _dial(self) -> Line:
        return Connection(self._path)

    def __repr__(self) -> str:
        """Whom it talks to."""
        return f"<{type(self).__name__}: {self._path}, {self._session.lost or self._session.doing}>"

    @property
    def doing(self) -> str:
        """What the generator does: what it loads or compiles before it takes requests, then ``"ready"``."""
        return self._session.doing

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
        return tokenizer_of(self._tokenizer_given, self._session.check_ready())

    def _load_tokenizer(self) -> None:
        """Load what makes tokens of text and text of tokens, if it is wanted: that takes seconds."""
        _ = self._decoding

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

    def _ask_stats(self) -> int:
        """Ask how the generator is doing, and return the number of the question.

        Raises:
            GeneratorError: it is not ready, or is gone.
        """
        self._session.check_ready()
        number = self._session.number()
        self._connection.send(AskStats(number))
        return number

    def _submit_all(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RemoteHandle]:
        """Begin to answer one prompt or several; all or none."""
        handles: list[RemoteHandle] = []
        try:
            handles += (self.submit(*entry) for entry in with_params(prompts, params))
        except BaseException:
            for handle in handles:
                handle.cancel()
            raise
        return handles

    def close(self) -> None:
        """End the connection, and with it the client's requests. Closing it again does nothing."""
        if self._finalizer is not None:
            self._finalizer()


def _close(session: Session, connection: Line) -> None:
    session.lost = session.lost or GeneratorLostError("the client is closed; make another one")
    connection.close()


def _ends(params: SamplingParams, ready: Ready) -> frozenset[int]:
    """Return the tokens that end an answer, and have no text."""
    eos = [] if params.ignore_eos else ready.ends
    return frozenset([*(params.stop_token_ids or ()), *eos, *(ready.form_ends if params.structured_outputs else ())])
