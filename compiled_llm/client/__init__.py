"""Talks to a generator, as one talks to an engine; imports neither torch nor transformers."""

from compiled_llm.client.async_client import AsyncClient
from compiled_llm.client.client import Client
from compiled_llm.client.errors import GeneratorBusyError, GeneratorError, GeneratorLostError

__all__ = ["AsyncClient", "Client", "GeneratorBusyError", "GeneratorError", "GeneratorLostError"]
