"""The compiled programs of one model, those of ``program_list``, each of which ends with sampling."""

# Shapes: B rows, T packed tokens, L tokens with logits, C of them with a sampled token, V vocabulary, N entries of the
# page table.

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.compat.huggingface import let_outputs_be_captured
from compiled_llm.compat.torch.dynamo import (
    NotCompiledError,
    compiled_code,
    forget_when_gone,
    graph_count,
    is_compiled_for,
    off_by_stance,
    own_copy,
    switched_off,
    tracing_seconds,
)
from compiled_llm.compat.torch.inductor import (
    build_probes_early,
    choose_ptxas,
    hash_sources_early,
    start_processes_early,
)
from compiled_llm.compilation.artifacts.artifacts import Artifacts
from compiled_llm.compilation.backend import Inductor, Pass
from compiled_llm.compilation.bounded import Bounded
from compiled_llm.compilation.graphs.outputs import StepOutputs
from compiled_llm.compilation.graphs.validity import Checks, Guards
from compiled_llm.compilation.inputs import DecodeInputs, PrefillInputs, UnpagedInputs
from compiled_llm.compilation.kept_programs import KEPT, ProgramRecorder, ProgramTaker
from compiled_llm.compilation.options import passes_for
from compiled_llm.compilation.passes.append import PreparedInAppend
from compiled_llm.compilation.passes.attention import PreparedInAttention
from compiled_llm.compilation.passes.norms import NormedSums
from compiled_llm.compilation.passes.patterns import is_like_llama
from compiled_llm.compilation.passes.products import FusedProducts
from compiled_llm.compilation.program import Program, ProgramInputs
from compiled_llm.compilation.program_list import PROGRAMS, program_for
from compiled_llm.compilation.regions import layers_in_equal_regions
from compiled_llm.compilation.sampling.sampling import SamplingTables
from compiled_llm.compilation.torch_compile.notice import CompilingNotice
from compiled_llm.compilation.tracing.active_adapters import ActiveAdapters
from compiled_llm.compilation.tracing.hooked_model import hooked_model
from compiled_llm.compilation.tracing.outline import Outline, Prepared
from compiled_llm.compilation.tracing.traced_code import TracedCodeWatch
from compiled_llm.config import WrapConfig
from compiled_llm.features import feature
from compiled_llm.kinds.kind import places_beside
from compiled_llm.kinds.spec import KVCacheSpec
from compiled_llm.model.facts import ModelFacts
from compiled_llm.model.version.code import places_of
from compiled_llm.model.weights.fused_weights import FusedWeights

logger = logging.getLogger("compiled_llm.graphs")

_LAYERS_IN_REGION_ON_CPU = 4  # SmolLM2-135M's 30 layers run as fast as in one graph; one by one 18% slower


_SEARCHING = (PreparedInAppend, PreparedInAttention, NormedSums)  # the passes that count what they find


class Arguments(NamedTuple):
    """The arguments of every program; ``inputs`` say which one serves them; each layer has ``pages`` and a spec."""

    model: PreTrainedModel
    inputs: ProgramInputs
    tables: SamplingTables
    pages: list[Tensor]
    specs: tuple[KVCacheSpec, ...]


class PreparedCall(NamedTuple):
    """A call of a program, independent of all other calls: any thread may make it, within ``paged``."""

    # ``function`` is the source of ``program``; ``arguments`` are by name, in order; ``code`` is the compiled code of
    # the program if its guards were just checked, which runs in its place; ``kept`` says what has to hold for a program
    # that runs as it was kept, None for others.

    program: Callable[..., Any]
    function: Callable[..., Any]
    arguments: dict[str, Any]
    code: Callable[..., Any] | None = None
    kept: Checks | None = None

    @property
    def interpreted(self) -> bool:
        return self.program is self.function

    @property
    def compiled(self) -> bool:
        return self.interpreted or self.kept is not None or is_compiled_for(self.function, self.arguments)

    def unguarded(self, ran: Callable[..., Any] | None) -> PreparedCall:
        """Return the call just made without guards, good until something changes; ``ran`` is its code, if known."""
        if self.interpreted or self.kept is not None:
            return self
        return self._replace(code=ran or self.code or compiled_code(self.function, self.arguments))

    def compiling_nothing(self) -> PreparedCall:
        """Return the call by the code that is compiled for it, or raise NotCompiledError if there is none."""
        call = self.unguarded(None)
        if call.code is None and not (call.interpreted or call.kept is not None):
            raise NotCompiledError.of(self.function, self.arguments)
        return call

    def bound(self) -> Callable[[], Any]:
        """Return what makes the call."""
        return functools.partial(self.code or self.program, *self.arguments.values())

    def __call__(self) -> Any:
        """Return ``StepOutputs``, or what else the program returns."""
        return self.bound()()


class Programs:
    """A model's compiled functions, called only in the model's executor.

    Attributes:
        outlines_layers: whether equal layers may be traced once; nodes of the others then get other names.
        eager: whether they run uncompiled, until others take over, or because ``torch.compile`` is switched off.
        cuts_regions: whether equal regions of a graph may be compiled once; if not, Inductor gets each graph whole.
        keeps: whether they may be those of an earlier process, and are kept for later ones.
    """

    outlines_layers = True
    cuts_regions = True
    keeps = True

    def __init__(
        self,
        config: WrapConfig,
        facts: ModelFacts,
        device: torch.device,
        weights: FusedWeights | None = None,
        artifacts: Artifacts | None = None,
        compilers: int | None = None,
    ) -> None:
        """Compile later, at the first call of each program; ``artifacts`` hold code in place of compiling."""
        # ``weights``, the fused ones, must be ``laid_out`` at each call. Of ``compilers`` of kernels, so many run at
        # once; of None, as many as there are cores.
        self._made_from = config, facts, device, weights, artifacts
        self._facts = facts
        self._taken_from: list[Programs] = []
        self._version = facts.version
        self._version.watch_code(places_of([facts.model_class]))
        self._code = self._version.code
        self._hooks, self._forward = facts.hooks.placed, facts.forward
        self._config = config
        self._device = device
        self._decode_ops = config.backend_on(device.type).decode_ops
        self._layers = facts.layers
        of_states = (number for number, layer in enumerate(facts.layers) for _ in layer.states)
        self._following = [*places_beside(facts.layers), *of_states]
        self._outlines: dict[str, Outline] = {}
        self._adapters = ActiveAdapters(self._version)
        self._passes: list[Pass] = []
        self._warned = self._captures_outputs = False
        self.in_trees = config.uses_trees_on(device.type)
        self._stance = off_by_stance()
        self.eager = _runs_uncompiled(config) or config.eager_first_on(device.type)
        self._artifacts, self._compilers = artifacts, compilers
        traces = bool(self._hooks) or self.eager or config.mode in ("eager", "reduce-overhead")
        kept = feature(KEPT) if self.keeps and not traces else None
        folder = None if artifacts is None else artifacts.folder
        self._recorder: ProgramRecorder | None = None
        self._taker: ProgramTaker | None = None
        if kept is not None:
            self._recorder, self._taker = kept.of_model(facts, config, folder)
        if config.mode != "eager" and not self.eager:
            begin_during_tracing(device, artifacts, traces=not self.kept)
        self.compiling = CompilingNotice(None if artifacts is None else artifacts.refuse)
        self._fused: list[Pass] = [FusedProducts(weights)] if weights is not None and weights.groups else []
        if facts.stand_ins is not None:
            self._fused.append(facts.stand_ins.rewrite)
        self._functions: dict[str, Callable[..., Any]] = {}
        self._programs: dict[str, Callable[..., Any]] = {}
        for program in PROGRAMS:
            self._add(program)

    def _add(self, program: Program) -> None:
        self._functions[program.name] = function = own_copy(program.step)
        forget_when_gone(self, [function])
        self._programs[program.name] = self.compile(program)

    def _name_for(self, inputs: ProgramInputs) -> str:
        """Return the name of the program that runs a step with these inputs, made now if its outputs are new."""
        program = program_for(inputs)
        if program.name not in self._functions:
            self._add(program)
        return program.name

    def compile(self, program: Program, more: Mapping[str, Any] = MappingProxyType({})) -> Callable[..., Any]:
        """Return a compiled program; ``more`` are options of Inductor's besides its own."""
        function = self._functions[program.name]
        passes = passes_for(self._config, self._device, self._fused, program.decodes)
        self._passes += passes
        own = program.options(self._config, self._device)
        workers = {} if self._compilers is None else {"compile_threads": self._compilers}
        options = {**own, **more, **workers, "post_grad_custom_post_pass": self.compiling}
        backend = Inductor(
            options,
            [TracedCodeWatch(self._version), *passes],
            layers_in_region=self._layers_in_region(),
            decode_ops=() if self._decode_ops is None else self._decode_ops.overloads,
            compile_graph=None if self._artifacts is None else self._artifacts.compile,
        )
        if self._recorder is not None and not more:
            backend = backend.recorded(self._recorder.compile, self._recorder.keep)
        if self.outlines_layers and not self._hooks and self._config.traces_layers_once_on(self._device.type):
            self._outlines[program.name] = Outline(function, self._version, self._following)
        return compiled(program, function, self._config, self._device, backend)

    def _layers_in_region(self) -> int:
        if not self.cuts_regions:
            return 0
        if self._config.captures_on(self._device.type):
            return 1
        return layers_in_equal_regions(self._layers, _LAYERS_IN_REGION_ON_CPU) if self._device.type == "cpu" else 0

    @property
    def interpreted(self) -> bool:
        """Whether they run uncompiled, until others take over or for good."""
        return self.eager or self._config.mode == "eager"

    def prefill(self, arguments: Arguments) -> StepOutputs:
        """Run ``prefill_step``; T, B, L and C are symbolic and must be at least 2."""
        outputs: StepOutputs = self.prepared(arguments)()
        return outputs

    def unpaged(self, arguments: Arguments) -> Tensor:
        """Run ``unpaged_step`` and return its logits; T, B and L are symbolic, and T and L must be at least 2."""
        logits: Tensor = self.prepared(arguments)()
        return logits

    def prepared(self, arguments: Arguments, compare: bool = True) -> PreparedCall:
        """Return a call for these arguments; ``compare`` checks for a prefill's recompilation, else the caller must."""
        inputs = arguments.inputs
        gives_more = inputs.wants or (isinstance(inputs, PrefillInputs) and inputs.pooling)
        if gives_more and not self._captures_outputs:
            let_outputs_be_captured(self._facts.model, self._adapted(arguments))
            self._captures_outputs = True
        name = self._name_for(arguments.inputs)
        if (taken := self._taken(name, arguments)) is not None:
            return taken
        prepared = self._prepared(name, arguments, compare)
        call = self._call(name, arguments._replace(model=prepared.model))
        if not (prepared.code or call.interpreted or isinstance(arguments.inputs, DecodeInputs)):
            _mark_symbolic(arguments)
        if self._recorder is not None and arguments.model is self._adapted(arguments):
            recorded = self._recorder.watching(name, call.function, call.program, self._by_name(arguments))
            call = call if call.interpreted else call._replace(program=recorded)
        if prepared.code is None or not self._has_run(name, prepared.code):
            return call
        return call._replace(code=prepared.code)

    def _has_run(self, name: str, code: Callable[..., Any]) -> bool:
        """Whether compiled code has run: the first time its program runs it, which loads its kernels."""
        program = self._programs[name]
        return isinstance(program, Bounded) and program.has_run(code)

    def _taken(self, name: str, arguments: Arguments) -> PreparedCall | None:
        """Return a call of the program as it was kept; None if it is traced."""
        if self._taker is None or self.interpreted or self._adapted(arguments) is not arguments.model:
            return None
        function, named = self._functions[name], self._by_name(arguments)
        call = self._taker.bound(name, function, named)
        if call is None:
            return None
        return PreparedCall(call, function, named, kept=self._taker.checks(name, function, named))

    def compiled_for(self, arguments: Arguments) -> bool:
        """Whether a call with these would compile nothing; the model has been checked."""
        name = self._name_for(arguments.inputs)
        if self._taken(name, arguments) is not None:
            return True
        return self._call(name, arguments._replace(model=self._stand_in(arguments))).compiled

    def beside(self) -> Programs:
        """Return programs of the same model, none of which is compiled: another thread may compile them."""
        # Nobody writes down what is compiled there: to note what a program does, it has to run.
        # On a CPU they leave a core to the answers.
        compilers = max(1, torch.get_num_threads() - 1) if self._device.type == "cpu" else None
        made = _ProgramsBeside(*self._made_from, compilers=compilers)
        made._adapters = self._adapters
        return made

    def compile_only(self, arguments: Arguments) -> None:
        """Compile the program of these arguments, and run nothing; in any thread, if it runs none."""
        name = self._name_for(arguments.inputs)
        model = self._prepared(name, arguments, compare=True).model
        program = self._programs[name]
        assert isinstance(program, Bounded), "uncompiled programs are not compiled ahead"
        program.compile(*self._by_name(arguments._replace(model=model)).values())

    def take(self, name: str, others: Programs) -> None:
        """Run the program of this name as another object has compiled it, from now on."""
        self._functions[name], self._programs[name] = others._functions[name], others._programs[name]
        if (outline := others._outlines.get(name)) is not None:
            self._outlines[name] = outline
        self._taken_from.append(others)  # whose end would free its code, which a capture may still need

    def refresh_adapters(self, model: PreTrainedModel, replays: bool) -> bool:
        """Refresh the active adapters; if CUDA graphs read them (``replays``), return if old ones still may."""
        return self._config.mode == "eager" or self._adapters.refresh(model, fixed=replays)

    def guards(self, arguments: Arguments, call: PreparedCall) -> Checks:
        """Return the guards of the program that serves these arguments, in a ``call`` that is captured."""
        if call.kept is not None:
            return call.kept
        # They do not notice layers whose tensors have been replaced since then: ``ModelVersion.tensors`` does.
        function, named = self._functions[self._name_for(arguments.inputs)], self._by_name(arguments)
        return Guards(function, named, lambda: {"model": self._stand_in(arguments)}, call.arguments)

    def code_valid(self) -> bool:
        """Whether classes still define the traced methods, and torch still compiles or not; Dynamo guards neither."""
        return self._code == self._version.code and self._stance == off_by_stance()

    def drop_tensors(self) -> None:
        """Drop the model's tensors until the next call."""
        self._adapters.drop()
        if self._taker is not None:
            self._taker.drop_tensors()
        for outline in self._outlines.values():
            outline.drop_tensors()

    def _prepared(self, name: str, arguments: Arguments, compare: bool) -> Prepared:
        """Return what the program is called with in place of the model, and prepare it."""
        model, inputs = self._adapted(arguments), arguments.inputs
        outline = self._outlines.get(name)
        if self.eager or outline is None or model is not arguments.model:
            return Prepared(model)
        if outline.is_current and isinstance(inputs, DecodeInputs):  # to compare would take too long in each step
            return Prepared(outline.standing_for(model))
        named = self._by_name(arguments)
        return outline.prepare(named) if compare else Prepared(outline.refreshed(named))

    def _stand_in(self, arguments: Arguments) -> PreTrainedModel:
        """Return what the program was last called with in place of the model, made again from the model as it is."""
        model, outline = self._adapted(arguments), self._outlines.get(program_for(arguments.inputs).name)
        return model if outline is None or model is not arguments.model else outline.of(self._by_name(arguments))

    def _adapted(self, arguments: Arguments) -> PreTrainedModel:
        """Return the model, or what stands in for it if adapters or hooks act: Dynamo then traces all its layers."""
        model = arguments.model if self.interpreted else self._adapters.of(arguments.model)
        standing: PreTrainedModel = hooked_model(model, self._hooks) if self._hooks else model
        return standing

    def _call(self, name: str, arguments: Arguments) -> PreparedCall:
        function = self._functions[name]
        return PreparedCall(function if self.eager else self._programs[name], function, self._by_name(arguments))

    def _by_name(self, arguments: Arguments) -> dict[str, Any]:
        return {"model": arguments.model, "forward": self._forward, **arguments._asdict()}

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The compiled functions by name; those that are compiled on demand once they were needed."""
        always = {program.name for program in PROGRAMS if not program.on_demand}
        return {name: function for name, function in self._functions.items() if name in always or graph_count(function)}

    def pattern_matches(self) -> dict[str, int]:
        """Return how often each pattern was found in the graphs that were searched for it."""
        found: Counter[str] = Counter()
        for searched in self._passes:
            if isinstance(searched, _SEARCHING) and searched.matches is not None:
                found[searched.pattern] += searched.matches
        return dict(found)

    def warn_if_nothing_matched(self, model: PreTrainedModel) -> None:
        """Warn, once, if a model looks like Llama, but its steps match no pattern."""
        matches = self.pattern_matches()
        if self._warned or not matches or any(matches.values()) or not is_like_llama(model):
            return
        self._warned = True
        logger.warning(
            "compiled_llm: %s has RMS norms and rotary embeddings, but writes them so that no pattern of ours matches; "
            "its steps are correct, and slower than they could be. Write both as the Llama of transformers does",
            type(model).__name__,
        )

    def full(self, inputs: ProgramInputs | None = None) -> bool:
        """Whether torch's limit is reached for the program that serves ``inputs``, or for any program."""
        programs = [*self._programs.values()] if inputs is None else [self._programs[self._name_for(inputs)]]
        return bool([program for program in programs if isinstance(program, Bounded) and program.full])

    def uncompiled(self) -> dict[str, int]:
        """Return how many calls of each program have run uncompiled because torch's limit was reached."""
        bounded = {name: program for name, program in self._programs.items() if isinstance(program, Bounded)}
        return {name: program.uncompiled for name, program in bounded.items() if program.uncompiled}

    def tracing_seconds(self) -> float:
        return tracing_seconds([*self.functions.values()])

    @property
    def kept(self) -> set[str]:
        """The names of programs that may run as they were kept."""
        return set() if self._taker is None else self._taker.names

    def ways(self) -> dict[str, str]:
        """Return where each program that has run comes from, as ``Stats.programs`` says."""
        traced = {name: "traced" for name, count in self.graph_counts().items() if count}
        if self._recorder is not None:
            traced |= {name: f"traced, not kept: {why}" for name, why in self._recorder.refused.items()}
        if self._taker is None:
            return traced
        misfits = {name: f"traced: {why}" for name, why in self._taker.misfits.items()}
        traced |= {name: misfits.get(name, way) for name, way in traced.items() if way == "traced"}
        given_up = {name: f"given up: {why}" for name, why in self._taker.given_up.items()}
        return {**traced, **given_up, **dict.fromkeys(sorted(self._taker.taken), "kept")}

    def graph_counts(self) -> dict[str, int]:
        """Return how many graphs each program has been compiled into; more than one is a recompile."""
        return {name: graph_count(function) for name, function in self.functions.items()}


class _ProgramsBeside(Programs):
    """Programs that are compiled in another thread, and then run in place of those of the same names."""

    keeps = False


def _runs_uncompiled(config: WrapConfig) -> bool:
    """Whether ``torch.compile`` is switched off; RuntimeError if the config's promises need it."""
    off = None if config.mode == "eager" else switched_off()
    if off is None:
        return False
    if config.batch_invariant:
        raise RuntimeError(
            f"batch_invariant=True: torch.compile is switched off by {off}, and uncompiled programs have other bits; "
            "leave one of the two out"
        )
    _say_uncompiled(off)
    return True


@functools.cache  # once a process, which is what it is switched off for
def _say_uncompiled(off: str) -> None:
    logger.warning("compiled_llm: torch.compile is switched off by %s: models run uncompiled, and slowly", off)


def begin_during_tracing(device: torch.device, artifacts: Artifacts | None, traces: bool = True) -> None:
    """Begin work that Inductor needs before it can look up a graph, and the tracing of the first one does not."""
    # Without ``traces``, programs are taken as they were kept; one that is traced nevertheless waits for all of it.
    if device.type == "cuda":
        choose_ptxas()  # before any of our kernels is built
    if traces or device.type == "cuda":  # Triton names its kernels by them
        hash_sources_early()
    if not traces:
        return
    if artifacts is not None:
        artifacts.begin(device.type)
    elif device.type == "cuda":
        start_processes_early()
    else:
        build_probes_early()


def _mark_symbolic(arguments: Arguments) -> None:
    """Mark the sizes of a prefill's inputs that change from call to call, and of what it leaves outside of pages."""
    for name, tensor in arguments.inputs._asdict().items():
        if isinstance(tensor, Tensor):
            torch._dynamo.mark_dynamic(tensor, 1 if name in ("ids", "positions") else 0)
    extra = arguments.inputs.extra if isinstance(arguments.inputs, PrefillInputs) else None
    for tensor, dimension in () if extra is None else extra.sizes:
        torch._dynamo.mark_dynamic(tensor, dimension)
    for memory in arguments.pages if isinstance(arguments.inputs, UnpagedInputs) else ():
        torch._dynamo.mark_dynamic(memory, 1)


def compiled(
    program: Program, function: Callable[..., Any], config: WrapConfig, device: torch.device, backend: Inductor
) -> Callable[..., Any]:
    """Return a program's function compiled as ``config.mode`` says."""
    if config.mode == "eager":
        return function
    return Bounded(function, backend, device, not config.batch_invariant, program.name, program.ahead)
