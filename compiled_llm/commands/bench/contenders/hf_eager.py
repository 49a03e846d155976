"""HuggingFace's ``generate`` as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from compiled_llm.commands.bench.contender import Setup
from compiled_llm.commands.bench.local import LocalSession, local_worker


class HFEager:
    """Nothing compiled, a cache that grows, the attention that HuggingFace chooses."""

    name = "hf-eager"
    summary = "HuggingFace, not compiled"

    def obstacle(self, setup: Setup) -> str | None:
        """It runs anywhere."""
        return None

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[LocalSession]:
        """Use the model as it is."""
        yield LocalSession(setup, setup.model(), compiles=False)

    def worker(self, setup: Setup) -> AbstractContextManager[list[str]]:
        """Run in a process of this environment."""
        return local_worker(setup, self.name)
