"""The one set of logic of both clients. It is written for an event loop; ``Client`` runs it in its caller's thread."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from compiled_llm.client.plain import Prompt, image_prompt_of, plain_list, plain_params, token_ids
from compiled_llm.client.source import ClientSource
from compiled_llm.client.text_of_prompt import TextOfPrompt
from compiled_llm.client.tokenizer import Given, tokenizer_of
from compiled_llm.client.transport.connection import Line
from compiled_llm.client.transport.session import ClientSession
from compiled_llm.protocol.messages import AskStats, Ready, Reply, StatsReply, Submit, Uncompiled
from compiled_llm.requests.answer import AnswerRecord
from compiled_llm.requests.columns import ReceivedColumn
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.listeners import Listeners, tell
from compiled_llm.requests.outputs import RequestOutput
from compiled_llm.requests.prompts import with_params
from compiled_llm.requests.sampling_params import SamplingParams

if TYPE_CHECKING:  # import torch
    from compiled_llm.requests.text.answer_text import TextFormat
    from compiled_llm.requests.text.detokenizer import TokenDecoder

T = TypeVar("T")

_OF_VECTORS = SamplingParams(max_tokens=0)

RETURNS_WITHIN = 5.0
"""Seconds in which the successor of a lost engine process may begin to listen, for a call that waits for it."""


class BaseClient(ABC):
    """A client that sends requests over a connection, and makes another one once that is lost."""

    def __init__(self, path: str | Path, tokenizer: Given) -> None:
        self._path = Path(path).expanduser()
        self._tokenizer_given = tokenizer
        self._session = ClientSession()
        self._reconnecting = threading.Lock()
        self._finalizer: weakref.finalize[..., BaseClient] | None = None

    # ---- how the two clients differ

    @abstractmethod
    def _dial(self) -> Line:
        """Connect, and say hello."""

    @abstractmethod
    async def _until(self, listeners: Listeners, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait ``timeout`` seconds at most, and return whether it is ``ready``."""

    @abstractmethod
    async def _apart(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function that may block."""

    @abstractmethod
    def _session_to_use(self) -> ClientSession:
        """Return the session that takes requests."""

    # ---- the connection

    def _connect(self) -> None:
        self._session.connect(self._dial)
        self._finalizer = weakref.finalize(self, self._session.close)

    def _reconnect(self, seconds: float = 0.0) -> None:
        """Connect again if the engine process was lost; its successor may begin to listen within so many seconds."""
        with self._reconnecting:
            if not (lost := self._session).broken:
                return
            session = ClientSession()
            session.connect(self._dial, seconds)
            if lost.closed:  # meanwhile, by another thread
                session.close()
            self.close()
            self._session = session
            self._finalizer = weakref.finalize(self, session.close)
            if self._tokenizer_given is True:  # the next engine process may have another model
                for name in ("_tokenizer", "_decoding"):
                    vars(self).pop(name, None)

    async def _wait_until_ready(self, timeout: float | None = None) -> Ready:
        if self._session.broken:
            await self._apart(self._reconnect, RETURNS_WITHIN if timeout is None else min(timeout, RETURNS_WITHIN))
        return await self._until_ready(timeout)

    async def _until_ready(self, timeout: float | None = None) -> Ready:
        session = self._session
        decided = await self._until(
            session.listeners, lambda: session.ready is not None or session.lost is not None, timeout
        )
        if not decided:
            raise TimeoutError(f"the engine process is not ready after {timeout} s: {session.doing}")
        return session.check_ready()

    def close(self) -> None:
        """End the connection, and with it the client's requests. Closing it again does nothing."""
        if self._finalizer is not None:
            self._finalizer()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._path}, {self._session.lost or self._session.doing}>"

    @property
    def unready_since(self) -> float | None:
        """When the engine process has stopped being ready, as ``time.monotonic``; None if it has not."""
        return self._session.unready_since

    @property
    def doing(self) -> str:
        """The work of the engine process: loading or compiling before it takes requests, then ``"ready"``."""
        return self._session.doing

    @property
    def uncompiled(self) -> Uncompiled | None:
        """Why answers run uncompiled: ``"compiling"`` until that is done, or ``"failed"``; None if they do not."""
        ready = self._session.ready
        return None if ready is None else ready.uncompiled

    @property
    def progress(self) -> tuple[int, int] | None:
        """Which step of how many that work is, from 1; None if steps are not counted, or it is ready."""
        return self._session.progress

    @property
    def heard(self) -> int:
        """How often something has come of the engine process, whose heartbeat comes every few seconds."""
        return self._session.heard

    # ---- requests, which any thread and any event loop may use

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        hidden_states: Sequence[int] | None = None,
        emitted: Sequence[str] | None = None,
        pooled: bool = False,
    ) -> RequestHandle:
        """Begin to answer a prompt, and return at once; whether the engine process takes it, the handle tells.

        Args:
            prompt: token ids, text, chat messages, or one of vLLM's dictionaries of them; the text of one may have
                images, files as bytes in ``multi_modal_data``.
            priority: smaller ones run first.
            timeout: seconds after which it ends with what it has; None for never.
            cache_salt: only requests with an equal one read what this one leaves in the prefix cache.
            hidden_states: layers whose hidden states its output has, as of ``Engine.submit``; needs torch here.
            emitted: names of what traced hooks of the model emit that its output has, as of ``Engine.submit``.
            pooled: have the vector of the prompt's last token in place of an answer, as of ``Engine.submit``.

        Raises:
            ValueError: the prompt or its settings cannot be sent.
            EngineProcessError: the engine process is not ready, or is gone.
        """
        params, session = params or (_OF_VECTORS if pooled else SamplingParams()), self._session_to_use()
        ready, number = session.check_ready(), session.number()
        image_prompt = image_prompt_of(prompt)
        ids = token_ids(prompt, self._tokenizer) if image_prompt is None else []
        asked = {
            "hidden_states": plain_list("hidden_states", hidden_states, int),
            "emitted": plain_list("emitted", emitted, str),
            "pooled": pooled or None,
        }
        wanted = {name: value for name, value in asked.items() if value is not None}
        submit = Submit(number, ids, plain_params(params), priority, timeout, cache_salt, image_prompt, wanted)
        ends, form, source = _ends(params, ready), self._form(params), ClientSource(self, session, number)
        records = [AnswerRecord[ReceivedColumn](index=index, stop_token_ids=ends) for index in range(params.n)]
        handle = RequestHandle(records, ids, source, form)
        session.expect(number, handle)
        try:
            session.send(submit)
        except BaseException:
            session.forget(number)
            raise
        return handle

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> TextOfPrompt:
        """Answer a prompt, and give the text piece by piece with ``for`` or ``async for``; options are ``submit``'s.

        To leave the loop ends the request. Without a tokenizer, iterate over what ``submit`` returns: its tokens.

        Raises:
            ValueError: as of ``submit``; or there is no tokenizer, or there are several answers.
            EngineProcessError: as of ``submit``.
        """
        return TextOfPrompt(self.submit(prompt, params, **options))

    async def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        **outputs: Any,
    ) -> list[RequestOutput]:
        await self._rejoin()
        handles: list[RequestHandle] = []
        listeners = Listeners()
        try:
            handles.extend(self.submit(*entry, **outputs) for entry in with_params(prompts, params))
            remaining = list(handles)

            def changed() -> None:
                tell([listeners])

            def over() -> bool:  # asked after each end, so one that has ended is not asked again
                while remaining and remaining[-1].done and remaining[-1].refused is None:
                    remaining.pop()
                return not remaining or any(handle.refused is not None for handle in remaining)

            for handle in handles:
                handle.when_ended(changed)
            await self._until(listeners, over)
            for handle in handles:
                if handle.refused is not None:
                    raise handle.refused
            return [handle.output() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()

    async def _stats(self, timeout: float | None) -> StatsReply:
        reply = await self._asked(AskStats, timeout)
        assert isinstance(reply, StatsReply)
        return reply

    async def _asked(self, question: Callable[[int], Struct], timeout: float | None) -> Reply:
        await self._rejoin()
        session = self._session
        session.check_ready()
        number = session.ask(question)
        try:
            if not await self._until(session.listeners, lambda: session.has_answered(number), timeout):
                raise TimeoutError(f"the engine process has not answered for {timeout} s")
            return session.reply(number)
        finally:
            session.forget(number)

    async def _rejoin(self) -> None:
        """Wait for the next engine process, if the last one was lost."""
        if self._session.broken:
            await self._wait_until_ready()

    # ---- the tokenizer

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of prompts and answers; None without one. One that is named is loaded once, here."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer_of(self._tokenizer_given, self._session.check_ready())

    @cached_property
    def _decoding(self) -> TokenDecoder | None:
        if self._tokenizer is None:
            return None
        from compiled_llm.requests.text.detokenizer import TokenDecoder

        return TokenDecoder(self._tokenizer)

    def _form(self, params: SamplingParams) -> TextFormat | None:
        if self._decoding is None:
            return None
        from compiled_llm.requests.text.answer_text import TextFormat

        return TextFormat.of(params, self._decoding)


def _ends(params: SamplingParams, ready: Ready) -> frozenset[int]:
    """Return the tokens that end an answer, and have no text."""
    eos = [] if params.ignore_eos else ready.eos_token_ids
    return frozenset([*(params.stop_token_ids or ()), *eos, *(ready.form_ends if params.structured_outputs else ())])
