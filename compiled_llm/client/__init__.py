"""Talks to an engine process, as one talks to an engine; imports neither torch nor transformers."""

from compiled_llm.client.async_client import AsyncClient
from compiled_llm.client.client import Client
from compiled_llm.client.errors import EngineBusyError, EngineDeadError, EngineProcessError

__all__ = ["AsyncClient", "Client", "EngineBusyError", "EngineDeadError", "EngineProcessError"]
