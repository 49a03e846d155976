"""The front's connection to its generator, which is made again whenever it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from compiled_llm.client import AsyncClient, GeneratorError
from compiled_llm.protocol.messages import Ready
from compiled_llm.server.front.api_error import unavailable
from compiled_llm.server.front.token_bytes import TokenBytes
from compiled_llm.server.front.vocabulary import Vocabulary, load_vocabulary

logger = logging.getLogger("compiled_llm.server")

_PAUSE = 0.1
"""Seconds between two tries to connect; meanwhile requests are refused."""


class Model(NamedTuple):
    """What answers requests: a generator that is ready, and its tokenizer."""

    client: AsyncClient
    ready: Ready
    vocabulary: Vocabulary
    token_bytes: TokenBytes


class GeneratorLink:
    """Connects to a generator, waits until it is ready, and begins again when it has gone.

    Attributes:
        was_ready: whether it has been, once.
    """

    def __init__(
        self, client: Callable[[Any], AsyncClient], changed: Callable[[bool], object] = lambda has_model: None
    ) -> None:
        """Know of no generator yet.

        Args:
            client: makes one that has not connected, with a tokenizer or None.
            changed: is told when there is somebody to answer requests (True), and when nobody is left (False).
        """
        self.was_ready = False
        self._new_client = client
        self._changed = changed
        self._client: AsyncClient | None = None
        self._model: Model | None = None
        self._vocabulary: Vocabulary | None = None

    @property
    def doing(self) -> str:
        """What the generator does: ``"ready"``, or what comes before."""
        if self._model is None and self._client is not None and self._client.doing == "ready":
            return "loading the tokenizer"
        return "starting" if self._client is None else self._client.doing

    @property
    def is_ready(self) -> bool:
        """Whether requests can be answered."""
        return self._model is not None and self._model.client.doing == "ready"

    @property
    def model(self) -> Model:
        """What answers requests.

        Raises:
            ApiError: nothing does now.
        """
        if self._model is None or not self.is_ready:
            raise unavailable(f"the model is not ready: {self.doing}", "not_ready")
        return self._model

    async def run(self) -> None:
        """Stay connected until it is cancelled."""
        try:
            while True:
                try:
                    await self._serve_once()
                except (GeneratorError, OSError) as error:
                    logger.debug("compiled_llm: no generator: %s", error)
                self._forget()
                await asyncio.sleep(_PAUSE)
        finally:
            self._forget()

    async def _serve_once(self) -> None:
        if self._vocabulary is None:
            self._vocabulary = await self._named_vocabulary()
        client = await self._connected(self._vocabulary.tokenizer)
        ready = await client.wait_until_ready()
        self._model = Model(client, ready, self._vocabulary, TokenBytes(self._vocabulary.tokenizer))
        self._changed(True)
        self.was_ready = True
        raise await client.wait_until_lost()

    async def _named_vocabulary(self) -> Vocabulary:
        """Load the tokenizer that the generator names, which it does once it is ready."""
        ready = await (await self._connected()).wait_until_ready()
        try:
            return await asyncio.to_thread(load_vocabulary, ready)
        finally:
            self._forget()

    async def _connected(self, tokenizer: Any = None) -> AsyncClient:
        self._client = self._new_client(tokenizer)
        await self._client.connect(wait=False)
        return self._client

    def _forget(self) -> None:
        if self._client is not None:
            self._client.close()
        if self._model is not None:
            self._changed(False)
        self._client = self._model = None
