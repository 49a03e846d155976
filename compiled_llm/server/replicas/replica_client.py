"""A front's client of replicas: as of one generator, over another line."""

from __future__ import annotations

import asyncio
from typing import Any

from compiled_llm.client import AsyncClient, GeneratorError
from compiled_llm.client.connection import Line
from compiled_llm.protocol.messages import Stats
from compiled_llm.server.replicas.replica_line import ReplicaLine, Replicas


class ReplicaClient(AsyncClient):
    """Sends each request to the replica that a router chooses."""

    def __init__(self, replicas: Replicas, tokenizer: Any = None) -> None:
        """Connect to nobody yet; made in the event loop that uses it.

        Args:
            replicas: that answer.
            tokenizer: as of ``AsyncClient``.
        """
        super().__init__("replicas", tokenizer=tokenizer)
        self._replicas = replicas
        self._loop = asyncio.get_running_loop()

    def _dial(self) -> Line:
        return ReplicaLine(self._replicas, self._loop)

    async def stats(self, timeout: float | None = 60) -> Stats:
        """There are none of all replicas together.

        Raises:
            GeneratorError: always.
        """
        raise GeneratorError("replicas are counted one by one, by Ray")
