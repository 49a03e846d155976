"""A generator in another process, to chat with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from compiled_llm.execution.progress import ProgressDisplay

if TYPE_CHECKING:  # need the extra `server`
    from compiled_llm.client.client import Client
    from compiled_llm.client.handle import RemoteHandle
    from compiled_llm.engine.params import SamplingParams
    from compiled_llm.protocol.messages import Stats


_LOOK = 0.2
"""Seconds between two looks at what a generator does that is not ready."""


class Generator:
    """A generator in another process; if it has gone, the next question looks for its successor."""

    def __init__(self, path: Path, quiet: bool) -> None:
        """Connect, and wait until it is ready.

        Raises:
            GeneratorError: there is none, or it does not want to talk to this client.
            ValueError: it has no tokenizer.
        """
        self._path = path
        self._quiet = quiet
        self._client = self._connected()

    def _connected(self) -> Client:
        from compiled_llm.client import Client

        with ProgressDisplay(not self._quiet).task("connecting to the generator") as doing:
            client = Client(self._path, tokenizer=True, wait=False)
            while client.doing != "ready":
                doing(f"the generator is not ready: {client.doing}")
                with suppress(TimeoutError):
                    client.wait_until_ready(_LOOK)
            ready = client.wait_until_ready()
            doing("loading the tokenizer")
            self.name, self.max_tokens, self.tokenizer = ready.model, ready.max_tokens, client.tokenizer
        return client

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> RemoteHandle:
        """Begin to answer token ids."""
        from compiled_llm.client import GeneratorLostError

        try:
            return self._client.submit(prompt, params)
        except GeneratorLostError:
            self.close()
            self._client = self._connected()
            return self._client.submit(prompt, params)

    def stats(self) -> Stats:
        """Return how the generator is doing."""
        return self._client.stats()

    def close(self) -> None:
        """End the connection."""
        self._client.close()


@contextmanager
def generator(path: Path, quiet: bool) -> Iterator[Generator]:
    """Connect to a generator for the block; raises as ``Generator``."""
    found = Generator(path, quiet)
    try:
        yield found
    finally:
        found.close()
