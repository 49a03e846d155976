"""Talks to a generator, as one talks to an engine; imports neither torch nor transformers."""

from compiled_llm.client.client import Client as Client
from compiled_llm.client.errors import GeneratorBusyError as GeneratorBusyError
from compiled_llm.client.errors import GeneratorError as GeneratorError
from compiled_llm.client.errors import GeneratorLostError as GeneratorLostError
