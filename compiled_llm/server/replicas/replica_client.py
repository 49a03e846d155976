"""An API server's client of several replicas, used as one of an engine process."""

from __future__ import annotations

from typing import Any

from compiled_llm.client import AsyncClient, EngineProcessError
from compiled_llm.client.transport.connection import Line
from compiled_llm.protocol.messages import StatsReply
from compiled_llm.server.replicas.replica_line import ReplicaLine, Replicas


class ReplicaClient(AsyncClient):
    """A client that sends each request to the replica that a router chooses."""

    def __init__(self, replicas: Replicas, tokenizer: Any = None) -> None:
        super().__init__("replicas", tokenizer=tokenizer)
        self._replicas = replicas

    def _dial(self) -> Line:
        assert self._loop is not None, "it was not connected"
        return ReplicaLine(self._replicas, self._loop)

    async def stats(self, timeout: float | None = 60) -> StatsReply:
        """Raise EngineProcessError: there are none of all replicas together."""
        raise EngineProcessError("replicas are counted one by one; each has its figures in Ray's metrics")
