"""A generator in another process, to chat with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from compiled_llm.commands.connecting import wait_until_ready
from compiled_llm.execution.reporting.progress import ProgressDisplay

if TYPE_CHECKING:  # need the extra `server`
    from compiled_llm.client.handle import RemoteHandle
    from compiled_llm.protocol.messages import Ready, Stats
    from compiled_llm.requests.sampling_params import SamplingParams


class Generator:
    """A generator in another process; if it has gone, the next question looks for its successor."""

    def __init__(self, path: Path, quiet: bool) -> None:
        """Connect, and wait until it is ready.

        Raises:
            GeneratorError: there is none, or it does not want to talk to this client.
            ValueError: it has no tokenizer.
        """
        from compiled_llm.client import Client

        self._client = Client(path, tokenizer=True, wait=False)
        self._quiet = quiet
        self._ready: Ready | None = None
        self.refresh()

    def refresh(self) -> bool:
        """Wait until it is ready, whatever it does now; whether it has another model than before."""
        before, ready = self._ready, wait_until_ready(self._client, self._quiet)
        if ready is not before:
            with ProgressDisplay(not self._quiet).task("loading the tokenizer"):
                self.tokenizer = self._client.tokenizer
            self.name, self.max_tokens, self._ready = ready.model, ready.max_tokens, ready
        return before is not None and ready != before

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> RemoteHandle:
        """Begin to answer token ids."""
        self.refresh()
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
