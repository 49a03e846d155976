"""Runs our programs on a few pages and watches what Dynamo makes of them."""

# Two passes: the programs as ``wrap`` compiles them, whole graphs and nothing else; and if one of them does not come
# out whole, a pass that goes on after each graph break, to find them all.

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from compiled_llm.compat.torch.dynamo import (
    CompiledGraph,
    compile_whole,
    compiled_graphs,
    compiled_with,
    forget_entries_of,
    graph_breaks_logged,
    graph_count,
    no_bytecode_hooks,
)
from compiled_llm.compat.torch.inductor import inductor_quiet, traced_by_inductor
from compiled_llm.compat.torch.stages import compiling_stage
from compiled_llm.compat.torch.tensors import versions_of
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.program import Program
from compiled_llm.compilation.program_list import DECODE_MANY, DECODE_ONE, PREFILL, PREFILL_ALONE
from compiled_llm.compilation.programs import Arguments, Programs
from compiled_llm.config import Mode, WrapConfig
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.lifecycle.runtime import runtime_of
from compiled_llm.execution.model_runner import ModelRunner
from compiled_llm.execution.reporting.progress import ProgressDisplay
from compiled_llm.execution.threads.executor import executor_for
from compiled_llm.explaining.profile.timings import Prompts, Timing, measure, tokens_to_hold
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.places import Place
from compiled_llm.model.sizes import max_positions_of
from compiled_llm.model.weights.fused_weights import FusedWeights

# Steps of one batch: a prefill, a decode step that compiles and one that shows what has changed since.
_STEPS = 3
_MAX_ROWS = 4


@dataclass
class Trace:
    """The trace of one program."""

    name: str
    function: Callable[..., Any]  # the function that was compiled; Dynamo's caches hang on it
    graphs: list[fx.GraphModule] = field(default_factory=list)  # the graphs that Dynamo handed to the compiler
    mutated: list[fx.Node] = field(default_factory=list)  # nodes that wrote to an input that has no fixed address
    error: Exception | None = None  # why the program could not be compiled whole
    owner: object = None  # the object whose end frees the function's graphs

    @property
    def finished(self) -> bool:
        """Whether the program cannot be compiled, or would be compiled at every step, so more runs tell nothing."""
        return self.error is not None or graph_count(self.function) > 1

    def backend(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return MutationWatch(graph, self.mutated).run


class MutationWatch(fx.Interpreter):
    """A run of a graph that notes which nodes write to inputs that CUDA graphs would have to copy."""

    def __init__(self, graph: fx.GraphModule, mutated: list[fx.Node]) -> None:
        super().__init__(graph)
        self._mutated = mutated
        self._placeholders = graph.graph.find_nodes(op="placeholder")
        self._moving: list[Tensor] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        nodes = self._placeholders
        self._moving = [
            value
            for node, value in zip(nodes, args, strict=True)
            if isinstance(value, Tensor) and not _is_static(node) and not value.is_inference()
        ]
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> object:
        before = versions_of(self._moving)
        result = super().run_node(n)
        if n not in self._mutated and before != versions_of(self._moving):
            self._mutated.append(n)
        return result


def _is_static(placeholder: fx.Node) -> bool:
    return "_dynamo_static_input_type" in placeholder.meta.get("tensor_dict", {})


class WholePrograms(Programs):
    """The programs as ``wrap`` compiles them, with Dynamo but no compiler; one that fails runs uncompiled."""

    keeps = False

    def __init__(self, facts: ModelFacts, config: WrapConfig, device: torch.device) -> None:
        super().__init__(config, facts, device)
        expands = facts.expands is not None and not config.batch_invariant
        names = (PREFILL, *[PREFILL_ALONE] * expands, DECODE_ONE, DECODE_MANY)
        self.traces = [Trace(name, self._functions[name], owner=self) for name in names]
        self._programs |= {trace.name: _whole(trace) for trace in self.traces}


def _whole(trace: Trace) -> Callable[..., Any]:
    compiled = compile_whole(trace.function, trace.backend)

    def run(*args: Any) -> Any:
        if not trace.finished:
            try:
                return compiled(*args)
            except Exception as error:  # of any kind: this is the error to explain
                trace.error = error
        return trace.function(*args)

    return run


class BrokenPrograms(Programs):
    """The programs compiled frame by frame, with every size built in; a graph for each part between breaks."""

    keeps = False

    def __init__(self, facts: ModelFacts, config: WrapConfig, device: torch.device) -> None:
        super().__init__(config, facts, device)
        self.graphs: list[fx.GraphModule] = []
        self._backend = self._keep
        for name in (PREFILL, DECODE_ONE):
            self._programs[name] = torch.compile(self._functions[name], backend=self._backend, dynamic=False)

    def prefill(self, arguments: Arguments) -> StepOutputs:
        """Run ``prefill_step`` without symbolic sizes, which graph breaks get wrong; compile it once."""
        outputs: StepOutputs = self._programs[PREFILL](*self._by_name(arguments).values())
        self._programs[PREFILL] = self._functions[PREFILL]
        return outputs

    @contextmanager
    def cleaned(self) -> Iterator[None]:
        """Remove from the user's functions the code that the block compiled, and only that."""
        try:
            yield
        finally:
            forget_entries_of(self._backend)

    def frames(self) -> list[CompiledFrame]:
        return [
            CompiledFrame(function.__code__, compiled_graphs(function)) for function in compiled_with(self._backend)
        ]

    def _keep(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


class CompiledFrame(NamedTuple):
    """A frame that was compiled because one around it could not be, and the graphs that it became."""

    code: CodeType
    graphs: list[CompiledGraph]

    @property
    def name(self) -> str:
        """The function's, with that of its class from Python 3.11 on."""
        return getattr(self.code, "co_qualname", self.code.co_name)

    @property
    def place(self) -> Place:
        return Place(self.code.co_filename, self.code.co_firstlineno, self.name)


class InductorPrograms(Programs):
    """The programs with Inductor's files kept: each one whole, also if ``wrap`` compiles regions."""

    outlines_layers = False
    cuts_regions = False
    keeps = False

    def __init__(
        self,
        facts: ModelFacts,
        config: WrapConfig,
        device: torch.device,
        weights: FusedWeights,
        folders: Mapping[str, Path],
    ) -> None:
        self._folders = folders
        super().__init__(config, facts, device, weights)

    def compile(self, program: Program, more: Mapping[str, Any] = MappingProxyType({})) -> Callable[..., Any]:
        folder = self._folders.get(program.name)
        return super().compile(program, {**more, **({} if folder is None else traced_by_inductor(str(folder)))})


class Sandbox:
    """A model on a few pages of its own, away from the ones that serve."""

    def __init__(self, facts: ModelFacts, config: WrapConfig, prompts: Sequence[NDArray[np.int64]]) -> None:
        longest = max(1, max_positions_of(facts.model) + 1 - _STEPS)
        self._prompts = [prompts[index % len(prompts)][:longest] for index in range(_MAX_ROWS - 1)]
        self._given = config
        tokens = sum(len(prompt) + _STEPS for prompt in self._prompts)
        self._config = self._configured("eager", _MAX_ROWS, tokens + _MAX_ROWS * config.page_size)
        self._facts = facts
        self._device = facts.model.device
        self.thread = executor_for(self._device, config)
        self._display = ProgressDisplay(config.progress)

    def whole(self) -> list[Trace]:
        programs = WholePrograms(self._facts, self._config, self._device)
        with self._display.task("tracing prefill and decode"):
            self.thread.call(self._run, programs, (1, 2, 3))
        return programs.traces

    def broken(self, look: Callable[[BrokenPrograms], object] | None = None) -> list[str]:
        """Run prefill and decode frame by frame, then ``look``; return what Dynamo said about each graph break."""
        programs = BrokenPrograms(self._facts, self._config, self._device)
        with programs.cleaned(), graph_breaks_logged() as messages, self._display.task("tracing around graph breaks"):
            self.thread.call(self._run, programs, (1,))
            if look is not None:
                look(programs)
        return messages

    def inductor(self, folders: Mapping[str, Path]) -> None:
        config = dataclasses.replace(self._config, mode="compile")
        with self._laid_out(config) as weights:
            programs = InductorPrograms(self._facts, config, self._device, weights, folders)
            stage = partial(compiling_stage, self.thread.call(threading.get_ident))
            with inductor_quiet(), self._display.task("compiling prefill and decode for the dump", stage):
                self.thread.call(self._run, programs, (1, 2))

    def timed(self, batches: Sequence[int], prompts: Prompts | None) -> list[Timing]:
        """Compile the programs as ``wrap`` would, and return where their time goes."""
        config = self._configured(
            self._given.mode, max(batches), tokens_to_hold(batches, prompts, self._given.page_size)
        )
        with self._laid_out(config):
            model_runner = self.thread.call(self._model_runner, config)
            return measure(model_runner, batches, prompts, config.progress)

    @contextmanager
    def _laid_out(self, config: WrapConfig) -> Iterator[FusedWeights]:
        """Fuse weights as ``wrap`` would; after the block, those of a model that is not wrapped are separate again."""
        weights = self.thread.call(self._fuse, config)
        try:
            yield weights
        finally:
            if runtime_of(self._facts.model) is None:
                self.thread.call(weights.separate)
                self.thread.call(self._facts.separate_stand_ins)

    def _fuse(self, config: WrapConfig) -> FusedWeights:
        facts = self._facts
        with facts.attention.moving_weights(self.thread.caller):
            if config.fuses_on(self._device.type):
                facts.lay_stand_ins_out()
            return FusedWeights(facts.model, facts.fused_groups if config.fuses_on(self._device.type) else [])

    def _configured(self, mode: Mode, rows: int, tokens: int) -> WrapConfig:
        return dataclasses.replace(self._given, mode=mode, max_batch_size=rows, kv_memory=f"{tokens} tokens")

    def _model_runner(self, config: WrapConfig, programs: Programs | None = None) -> ModelRunner:
        return ModelRunner(self._facts, config, self.thread, programs=programs)

    def _run(self, programs: Programs, batches: Sequence[int]) -> None:
        model_runner = self._model_runner(dataclasses.replace(self._config, progress=False), programs)
        with no_bytecode_hooks():
            for size in batches:
                self._step(GenerateLoop(model_runner), size)

    def _step(self, generate_loop: GenerateLoop, rows: int) -> None:
        for prompt in self._prompts[:rows]:
            generate_loop.admit(prompt, _STEPS)
        for _ in range(_STEPS):
            generate_loop.step()
        generate_loop.close()
