"""HuggingFace's static cache, with which its ``generate`` compiles by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from transformers import PreTrainedModel

from compiled_llm.commands.bench.contender import Setup, free_memory
from compiled_llm.commands.bench.local import LocalSession, local_worker
from compiled_llm.commands.bench.workload import Workload


class HFStatic:
    """A cache of fixed size, and the forward that HuggingFace compiles for it."""

    name = "hf-static"
    summary = "HuggingFace, static cache and its own compile"

    def obstacle(self, setup: Setup) -> str | None:
        """HuggingFace compiles on accelerators only."""
        return None if setup.device.type == "cuda" else "HuggingFace compiles by itself on CUDA only"

    @contextmanager
    def opened(self, setup: Setup) -> Iterator[LocalSession]:
        """Use the model, and leave nothing compiled on it."""
        model = setup.model()
        try:
            yield _StaticSession(setup, model, warm_calls=3, cache_implementation="static")
        finally:
            _forget(model)
            free_memory(setup.device)

    def worker(self, setup: Setup) -> AbstractContextManager[list[str]]:
        """Run in a process of this environment."""
        return local_worker(setup, self.name)


class _StaticSession(LocalSession):
    def prepare(self, workload: Workload) -> None:
        """Compile again: a second shape would make the graphs of all later ones symbolic, and slower."""
        _forget(self.model)
        free_memory(self.setup.device)
        super().prepare(workload)


def _forget(model: PreTrainedModel) -> None:
    """Drop what ``generate`` left on the model: the compiled call with its graphs, and the cache's size."""
    for name in ("_compiled_call", "_last_compile_config", "_previous_max_cache_length"):
        model.__dict__.pop(name, None)
    torch._dynamo.reset()
