"""What of a model's device side outlives it while the model sleeps: what was compiled, and which steps were ready."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from compiled_llm.compilation.inputs import Shape
from compiled_llm.compilation.programs import PREFILL_EMBEDDED, Programs
from compiled_llm.config import WrapConfig
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.model.weights.fused_weights import FusedWeights


@dataclass(frozen=True)
class Kept:
    """Host facts and compiled code; none of it takes device memory.

    Attributes:
        made_for: where the model was, of which type, with which hooks.
        rows: how many rows there was room for.
        positions: how many positions the model had.
        pages: how many there were.
        programs: the compiled functions; None if their CUDA graphs are part of them, and had to go with them.
        weights: which of the model's lie side by side in memory.
        buckets: decode steps that were ready.
        embedded: whether prefill from embeddings was.
        shapes: captured prefills, smallest first.
        choices: for how many rows deferred sampling were captured.
    """

    made_for: tuple[Hashable, ...]
    rows: int
    positions: int
    pages: int
    programs: Programs | None
    weights: FusedWeights
    buckets: tuple[int, ...]
    embedded: bool
    shapes: tuple[Shape, ...]
    samplings: tuple[int, ...]

    @staticmethod
    def of(model_runner: ModelRunner, made_for: tuple[Hashable, ...]) -> Kept:
        """Return what is worth keeping of a device side that was ``made_for`` the model as it was."""
        graph_manager = model_runner.graph_manager
        return Kept(
            made_for=made_for,
            rows=model_runner.config.max_batch_size,
            positions=model_runner.max_positions,
            pages=model_runner.pool.total,
            programs=None if graph_manager.programs.in_trees else graph_manager.programs,
            weights=graph_manager.weights,
            buckets=tuple(graph_manager.ready_buckets),
            embedded=PREFILL_EMBEDDED in graph_manager.ready,
            shapes=tuple(sorted(graph_manager.cuda_graphs.shapes())),
            samplings=tuple(model_runner.state.sampling_graphs.buckets),
        )

    def fits(self, made_for: tuple[Hashable, ...], rows: int, positions: int) -> bool:
        """Whether a device side that is made now can run what was compiled."""
        return (self.made_for, self.rows, self.positions) == (made_for, rows, positions)

    def configured(self, config: WrapConfig) -> WrapConfig:
        """Return ``config`` with as many pages as there were: whatever fitted fits again, and nothing is compiled."""
        return replace(config, kv_memory=f"{self.pages * config.page_size} tokens")
