"""Pages that stand in for a cache of HuggingFace's: they read it in, and write new tokens back at the end."""

# So HuggingFace's own forward may compute a prompt, over its own cache, and decode steps run over pages. Shapes: B
# rows, C columns.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from transformers import Cache, PretrainedConfig

from compiled_llm.compat.huggingface import add_index_keys
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.reporting.slow_paths import Reason
from compiled_llm.execution.threads.interrupts import deferred
from compiled_llm.huggingface.cache.paged_cache import PagedCache, PendingPrompt
from compiled_llm.huggingface.cache.reading import read_into
from compiled_llm.kinds.registry import add_states


class StandIn(PagedCache):
    """A cache in pages in place of one of HuggingFace's."""

    def __init__(self, model_runner: ModelRunner, original: Cache, returned: bool, reason: Reason | None) -> None:
        """``reason``: why HuggingFace's own forward runs over it first; None if it does not."""
        super().__init__(model_runner)
        self.original: Cache | None = original  # HuggingFace's cache; None once it is no longer needed
        self.returned = returned  # whether the user gets it
        self.prefill = None if reason is None else PendingPrompt(reason, original)

    @deferred()
    def read(self, shown: NDArray[np.bool_], positions: Sequence[int]) -> None:
        """Read the original's columns beyond the known ones, as ``read_into``."""
        assert self.original is not None
        read_into(self, self.original, shown, positions)

    def end_prefill(self) -> None:
        super().end_prefill()
        if not self.returned:
            self.original = None

    def handed_over(self, config: PretrainedConfig) -> Cache:
        return self.write_back() if self.returned else super().handed_over(config)

    @deferred()
    def write_back(self) -> Cache:
        """Append to the original the tokens stored since it was read, and give all pages back; return it."""
        original = self.original
        assert original is not None
        known = int(original.get_seq_length())
        layers = self.model_runner.state.facts.layers
        if known < self.seen:
            for index in [number for number, layer in enumerate(layers) if layer.fills_caches]:
                keys, values = self.copied(index)
                original.update(keys[:, :, known:], values[:, :, known:], index)
            for index, keys in self.index_keys():
                add_index_keys(original, keys[:, known:], index)
            add_states(original, layers, self.generate_loop.states())
        self.close()
        return original
