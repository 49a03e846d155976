"""The backend of ``torch.compile``: our passes over Dynamo's graph, then Inductor, on the whole graph or piecewise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from compiled_llm.compat.torch.dynamo import leave_unguarded
from compiled_llm.compat.torch.inductor import compile_with_inductor
from compiled_llm.compat.torch.tensors import note_examples
from compiled_llm.compilation.passes.empty_parts import copy_lone_parts
from compiled_llm.compilation.regions import (
    Examples,
    Region,
    attentions_in,
    cut,
    join,
    without_symbols,
)
from compiled_llm.compilation.tracing.layer_marks import fill
from compiled_llm.kinds.registry import state_ops
from compiled_llm.model.version.training import FLAGS
from compiled_llm_ops.attention.lse import ATTENTIONS

Compiled = Callable[..., Any]
Pass = Callable[[fx.Graph], object]
Keep = Callable[[fx.Graph, Sequence[Region], Sequence[Compiled], Compiled], Compiled]
"""Takes a graph, its regions if it was cut, a compiled function of each or of the graph, and what calls these."""

CompileGraph = Callable[[fx.GraphModule, Sequence[Any], Mapping[str, Any]], Compiled]

# The one with the last layers is compiled for itself: with fewer regions, the others save less than half of the work.
_FEWEST_REGIONS = 4


class Inductor:
    """A compiler of a graph as Dynamo has made it, of a model or of its outline."""

    def __init__(
        self,
        options: Mapping[str, Any],
        passes: Sequence[Pass] = (),
        *,
        layers_in_region: int,
        decode_ops: Sequence[torch._ops.OpOverload] = (),
        compile_graph: CompileGraph | None = None,
    ) -> None:
        """Compile later, at each call; ``passes`` rewrite the whole graph in place, before Inductor."""
        # ``layers_in_region``: compile equal regions of so many layers once; 0 gives Inductor the whole graph. A region
        # costs the host 0.1 to 0.3 ms a call, which the replay of a CUDA graph does not pay. A graph is cut before
        # ``decode_ops`` of a backend, as before our own ops of attention.
        self._options = dict(options)
        self._passes = passes
        self._attentions = (*ATTENTIONS, *decode_ops)
        self._compile_graph = compile_graph
        self._keep: Keep | None = None
        # how many layers each region has, of which equal ones are compiled once; 0 if none are cut
        self.layers_in_region = layers_in_region

    def recorded(self, compile_graph: CompileGraph, keep: Keep) -> Inductor:
        """Return this compiler, which compiles by ``compile_graph``, and runs what ``keep`` returns."""
        # ``keep`` is given what would run in place of a graph.
        self._compile_graph, self._keep = compile_graph, keep
        return self

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Return the compiled graph; ``inputs`` are those of the first call."""
        leave_unguarded(FLAGS)
        fill(module.graph)
        for rewrite in self._passes:
            rewrite(module.graph)
        of_states = next((ops for ops in state_ops() if attentions_in(module.graph, ops)), ())
        mixers = (*self._attentions, *of_states)
        if not self._worth_cutting(attentions_in(module.graph, mixers)):
            module.recompile()
            compiled = self._compiled(module, inputs)
            return compiled if self._keep is None else self._keep(module.graph, [], [compiled], compiled)
        return self._compile_regions(module, mixers)

    def _worth_cutting(self, layers: int) -> bool:
        own = self.layers_in_region
        return own == 1 or 0 < _FEWEST_REGIONS * own <= layers

    def _compile_regions(self, module: fx.GraphModule, mixers: Sequence[torch._ops.OpOverload]) -> Compiled:
        copy_lone_parts(module.graph)
        regions, examples = cut(module, self.layers_in_region, mixers), Examples(module)
        known: dict[str, Compiled] = {}
        functions = []
        for region in regions:
            examples.complete(region)
            inputs = examples.of(region)
            description = region.describe(inputs)
            compiled_for = without_symbols(description)
            if compiled_for not in known:
                known[compiled_for] = self._compile_region(fx.GraphModule(module, region.graph), inputs)
            functions.append(known[compiled_for])
            examples.follow(region, description)
        joined = join(regions, functions, module.graph).forward
        return joined if self._keep is None else self._keep(module.graph, regions, functions, joined)

    def _compile_region(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        note_examples(module.graph, inputs)
        return self._compiled(module, inputs)

    def _compiled(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        return (self._compile_graph or compile_with_inductor)(module, inputs, self._options)
