"""The part of a model runner that outlives it while the model sleeps: its programs, and which steps were ready."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.compilation.programs import Programs
from compiled_llm.config import WrapConfig
from compiled_llm.execution.batch import ExtraInputs
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.model.weights.fused_weights import FusedWeights


@dataclass(frozen=True)
class CompiledParts:
    """The host facts and compiled code of a model runner, which outlive it; none of it takes device memory."""

    made_for: tuple[Hashable, ...]  # where the model was, of which type, with which hooks
    rows: int
    positions: int
    tokens: int  # that fill all pages
    states: int  # entries for those of rows
    # the compiled functions; None if their CUDA graphs are part of them, and had to go with them
    programs: Programs | None
    weights: FusedWeights
    decodes: tuple[StepKey, ...]  # steps that were ready
    extras: tuple[ExtraInputs, ...]  # those of no tokens, of each program that reads more than ids and was ready
    shapes: tuple[StepKey, ...]  # captured prefills, smallest first
    samplings: tuple[int, ...]  # the numbers of rows whose deferred sampling was captured
    prepared: tuple[Callable[[ModelRunner], None], ...]  # prepare what features had prepared ahead

    @staticmethod
    def of(model_runner: ModelRunner, made_for: tuple[Hashable, ...]) -> CompiledParts:
        graph_manager, table = model_runner.graph_manager, model_runner.state.step_table
        stay = not graph_manager.programs.in_trees
        return CompiledParts(
            made_for=made_for,
            rows=model_runner.config.max_batch_size,
            positions=model_runner.max_positions,
            tokens=model_runner.pool.tokens_in(model_runner.pool.total),
            states=0 if model_runner.pool.states is None else model_runner.pool.states.total,
            programs=graph_manager.programs if stay else None,
            weights=graph_manager.weights,
            decodes=tuple(table.runnable("decode", shares=True)),
            extras=model_runner.prefill.launches.extras if stay else (),
            shapes=tuple(sorted(table.of("prefill"))),
            samplings=tuple(model_runner.steps.sampling_graphs.buckets),
            prepared=tuple(model_runner.prepared.values()),
        )

    def fits(self, made_for: tuple[Hashable, ...], rows: int, positions: int) -> bool:
        """Return whether a model runner that is made now can run these programs."""
        return (self.made_for, self.rows, self.positions) == (made_for, rows, positions)

    def configured(self, config: WrapConfig) -> WrapConfig:
        """Return ``config`` with as many pages as there were: all that fitted fits again, and nothing is compiled."""
        return replace(config, kv_memory=f"{self.tokens} tokens")
