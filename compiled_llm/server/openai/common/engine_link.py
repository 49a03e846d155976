"""The API server's connection to its engine process, which is made again whenever it is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from compiled_llm.client import AsyncClient, EngineProcessError
from compiled_llm.protocol.messages import Ready
from compiled_llm.server.daemon_threads import in_thread
from compiled_llm.server.http.api_error import unavailable
from compiled_llm.server.openai.tokenizer.token_bytes import TokenBytes
from compiled_llm.server.openai.tokenizer.vocabulary import TokenizerError, Vocabulary, load_vocabulary

logger = logging.getLogger("compiled_llm.server")

_PAUSE = 0.1  # seconds between two tries to connect; meanwhile requests are refused
_SILENT_SECONDS = 30.0  # after which an engine process that says nothing hangs; its heartbeat comes every five
_LOOKS = 6
"""How often it is looked at in that time. The time alone would count those in which this process itself stood still."""


_HANGS = "the process that runs the model has said nothing for {:g} s: it is stopped or blocked"


class Model(NamedTuple):
    """A model that answers requests: an engine process that is ready, and its tokenizer."""

    client: AsyncClient
    ready: Ready
    vocabulary: Vocabulary
    token_bytes: TokenBytes


class EngineLink:
    """A connection to an engine process, made again when it has gone; one that hangs is left alone: it may go on."""

    def __init__(
        self,
        client: Callable[[Any], AsyncClient],
        changed: Callable[[bool], object] = lambda has_model: None,
        failed: Callable[[str], object] | None = None,
        escapes: bool = False,
    ) -> None:
        self.was_ready = False  # whether it has been, once
        self._new_client, self._escapes = client, escapes
        self._changed = changed
        self._failed = failed or partial(logger.error, "compiled_llm: %s")
        self._told = self._has_failed = self._hangs = False
        self._since = time.monotonic()
        self._client: AsyncClient | None = None
        self._model: Model | None = None
        self._vocabulary: Vocabulary | None = None

    @property
    def doing(self) -> str:
        """The engine process's state: ``"ready"``, or the step before."""
        if self._has_failed:
            return "failed; the log says why"
        if self._hangs:
            return _HANGS.format(_SILENT_SECONDS)
        if self._model is None and self._client is not None and self._client.doing == "ready":
            return "loading the tokenizer"
        return "starting" if self._client is None else self._client.doing

    @property
    def progress(self) -> tuple[int, int] | None:
        """Which step of how many that is, if steps are counted."""
        return None if self._client is None or self._hangs else self._client.progress

    @property
    def unready_seconds(self) -> float:
        """Since when no requests are answered: since it was made, the engine process was lost, or it went to sleep."""
        slept = None if self._client is None else self._client.unready_since
        return time.monotonic() - (slept or self._since)

    @property
    def is_ready(self) -> bool:
        return self._model is not None and not self._hangs and self._model.client.doing == "ready"

    @property
    def model(self) -> Model:
        """The model, with its engine process and tokenizer; ApiError if it is not ready."""
        if self._model is None or not self.is_ready:
            raise unavailable(f"the model is not ready: {self.doing}", "not_ready")
        return self._model

    async def run(self) -> None:
        """Stay connected until it is cancelled, or fails in a way that would repeat."""
        watching = asyncio.create_task(self._watch())
        try:
            await self._serve()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # of a tokenizer's code, whose panics are no Exception
            self._has_failed = True
            if not isinstance(error, TokenizerError):
                logger.error("compiled_llm: an unexpected error", exc_info=error)
            self._failed(str(error))
        finally:
            watching.cancel()
            self._forget()

    async def _serve(self) -> None:
        while True:
            try:
                await self._serve_once()
            except (EngineProcessError, OSError) as error:
                logger.debug("compiled_llm: no engine process: %s", error)
            self._forget()
            await asyncio.sleep(_PAUSE)

    async def _serve_once(self) -> None:
        if self._vocabulary is None:
            self._vocabulary = await self._named_vocabulary()
        client = await self._connected(self._vocabulary.tokenizer)
        ready = await client.wait_until_ready()
        self._model = Model(client, ready, self._vocabulary, TokenBytes(self._vocabulary.tokenizer))
        self._tell()
        raise await client.wait_until_lost()

    async def _named_vocabulary(self) -> Vocabulary:
        """Load the tokenizer that the engine process names, which it does once it is ready."""
        ready = await (await self._connected()).wait_until_ready()
        try:
            return await in_thread(lambda: load_vocabulary(ready, self._escapes))
        finally:
            self._forget()

    async def _connected(self, tokenizer: object = None) -> AsyncClient:
        self._client = self._new_client(tokenizer)
        await self._client.connect(wait=False)
        return self._client

    def _forget(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = self._model = None
        self._hangs = False
        self._tell()

    def _tell(self) -> None:
        """Say whether requests can be answered, if that has changed."""
        has_model = self._model is not None and not self._hangs
        if has_model != self._told:
            self._told, self._since = has_model, time.monotonic()
            self._changed(has_model)
            self.was_ready |= has_model

    # ---- a process that hangs

    async def _watch(self) -> None:
        """Look again and again whether the engine process says anything."""
        heard, silent = None, 0
        while True:
            await asyncio.sleep(_SILENT_SECONDS / _LOOKS)
            client, before = self._client, heard
            heard = None if client is None else (client, client.heard)
            silent = silent + 1 if heard is not None and heard == before else 0
            if client is not None and (silent >= _LOOKS) != self._hangs:
                self._turn(client, hangs=not self._hangs)

    def _turn(self, client: AsyncClient, hangs: bool) -> None:
        """Note that the process hangs, and tell its requests so; or that it goes on."""
        self._hangs = hangs
        logger.warning("compiled_llm: %s", _HANGS.format(_SILENT_SECONDS) if hangs else "the engine process goes on")
        if hangs:
            client.give_up(EngineProcessError(_HANGS.format(_SILENT_SECONDS)))
        self._tell()
