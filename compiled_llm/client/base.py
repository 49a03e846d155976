"""What clients for threads and for event loops have in common: requests, which any thread and event loop can use."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_llm.client.handle import RemoteHandle
from compiled_llm.client.plain import Prompt, plain_params, token_ids
from compiled_llm.client.text_of_prompt import TextOfPrompt
from compiled_llm.client.tokenizer import Given, tokenizer_of
from compiled_llm.client.transport.connection import Line, ThreadConnection
from compiled_llm.client.transport.link import ClientLink
from compiled_llm.client.transport.session import ClientSession
from compiled_llm.protocol.messages import AskStats, Cancel, Ready, Submit
from compiled_llm.requests.sampling_params import SamplingParams
from compiled_llm.requests.several_prompts import with_params

if TYPE_CHECKING:  # what makes text imports torch
    from compiled_llm.requests.answer_text import TextFormat
    from compiled_llm.requests.detokenizer import TokenDecoder


RETURNS_WITHIN = 5.0
"""Seconds in which an engine process that was lost may begin to listen again, for who waits for it."""


class BaseClient:
    """Sends requests over a connection, and brings what comes of them to their handles."""

    def __init__(self, path: str | Path, tokenizer: Given) -> None:
        """Connect to nobody yet.

        Args:
            path: of the engine process's socket.
            tokenizer: as the user gave it.
        """
        self._path = Path(path).expanduser()
        self._tokenizer_given = tokenizer
        self._link = ClientLink()
        self._linking = threading.Lock()
        self._finalizer: weakref.finalize[..., BaseClient] | None = None

    def _connect(self) -> None:
        """Connect.

        Raises:
            EngineDeadError: there is no engine process.
            EngineProcessError: it does not want to talk to this client.
        """
        self._link.connect(self._dial)
        self._finalizer = weakref.finalize(self, self._link.close)

    def _reconnect(self, seconds: float = 0.0) -> None:
        """Connect again if the engine process was lost.

        Args:
            seconds: in which the next one may begin to listen.

        Raises:
            EngineDeadError: there is none.
            EngineProcessError: it does not want to talk to this client.
        """
        with self._linking:
            if (lost := self._link).broken:
                link = ClientLink()
                link.connect(self._dial, seconds)
                if lost.closed:  # meanwhile, by another thread
                    link.close()
                self._replace(link)

    def _replace(self, link: ClientLink) -> None:
        self.close()
        self._link = link
        self._finalizer = weakref.finalize(self, link.close)
        if self._tokenizer_given is True:  # the next engine process may have another model
            for name in ("_tokenizer", "_decoding"):
                self.__dict__.pop(name, None)

    def _link_to_use(self) -> ClientLink:
        return self._link

    @property
    def _session(self) -> ClientSession:
        return self._link.session

    def _dial(self) -> Line:
        return ThreadConnection(self._path)

    def __repr__(self) -> str:
        """Whom it talks to."""
        return f"<{type(self).__name__}: {self._path}, {self._session.lost or self._session.doing}>"

    @property
    def doing(self) -> str:
        """What the engine process does: what it loads or compiles before it takes requests, then ``"ready"``."""
        return self._session.doing

    @property
    def heard(self) -> int:
        """How often something has come of the engine process, whose heartbeat comes every few seconds."""
        return self._session.heard

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
    ) -> RemoteHandle:
        """Begin to answer a prompt, and return at once; whether the engine process takes it, the handle tells.

        Args:
            prompt: token ids, text or chat messages.
            params: how to answer.
            priority: smaller ones run first.
            timeout: seconds after which it ends with what it has; None for never.
            cache_salt: only requests with an equal one read what this one leaves in the prefix cache.

        Raises:
            ValueError: the prompt or its settings cannot be sent.
            EngineProcessError: the engine process is not ready, or is gone.
        """
        params, link = params or SamplingParams(), self._link_to_use()
        session = link.session
        ready, number = session.check_ready(), session.number()
        ids = token_ids(prompt, self._tokenizer)
        submit = Submit(number, ids, plain_params(params), priority, timeout, cache_salt)
        cancel = partial(self._cancel, link, number)
        handle = RemoteHandle(ids, params.n, _ends(params, ready), self._form(params), cancel, link.check_may_wait)
        session.expect(number, handle)
        try:
            link.send(submit)
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
            EngineProcessError: as of ``submit``.
        """
        return TextOfPrompt(self.submit(prompt, params, **options))

    def _cancel(self, link: ClientLink, number: int, index: int | None) -> None:
        link.send(Cancel(number, index))

    @property
    def tokenizer(self) -> Any:
        """What makes tokens of text and text of tokens; None without one. One that is named is loaded once, here."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_of(self._tokenizer_given, self._session.check_ready())

    def _load_tokenizer(self) -> None:
        """Load what makes tokens of text and text of tokens, if it is wanted: that takes seconds."""
        _ = self._decoding

    @cached_property
    def _decoding(self) -> TokenDecoder | None:
        if self._tokenizer is None:
            return None
        from compiled_llm.requests.detokenizer import TokenDecoder

        return TokenDecoder(self._tokenizer)

    def _form(self, params: SamplingParams) -> TextFormat | None:
        if self._decoding is None:
            return None
        from compiled_llm.requests.answer_text import TextFormat

        return TextFormat.of(params, self._decoding)

    def _ask_stats(self) -> tuple[ClientSession, int]:
        """Ask how the engine process is doing, and return whom, and the number of the question.

        Raises:
            EngineProcessError: it is not ready, or is gone.
        """
        link = self._link
        link.session.check_ready()
        number = link.session.ask()
        link.send(AskStats(number))
        return link.session, number

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


def _ends(params: SamplingParams, ready: Ready) -> frozenset[int]:
    """Return the tokens that end an answer, and have no text."""
    eos = [] if params.ignore_eos else ready.eos_token_ids
    return frozenset([*(params.stop_token_ids or ()), *eos, *(ready.form_ends if params.structured_outputs else ())])
