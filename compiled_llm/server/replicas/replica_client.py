"""An API server's client of replicas: as of one engine process, over another line."""

from __future__ import annotations

from typing import Any

from compiled_llm.client import AsyncClient, EngineProcessError
from compiled_llm.client.transport.connection import Line
from compiled_llm.protocol.messages import StatsReply
from compiled_llm.server.replicas.replica_line import ReplicaLine, Replicas


class ReplicaClient(AsyncClient):
    """Sends each request to the replica that a router chooses."""

    def __init__(self, replicas: Replicas, tokenizer: Any = None) -> None:
        """Connect to nobody yet.

        Args:
            replicas: that answer.
            tokenizer: as of ``AsyncClient``.
        """
        super().__init__("replicas", tokenizer=tokenizer)
        self._replicas = replicas

    def _dial(self) -> Line:
        assert self._loop is not None, "it was not connected"
        return ReplicaLine(self._replicas, self._loop)

    async def stats(self, timeout: float | None = 60) -> StatsReply:
        """There are none of all replicas together.

        Raises:
            EngineProcessError: always.
        """
        raise EngineProcessError("replicas are counted one by one; each has its figures in Ray's metrics")
