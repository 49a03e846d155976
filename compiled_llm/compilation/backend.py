"""The backend of ``torch.compile``: our passes over Dynamo's graph, then Inductor, on the whole graph or piecewise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from compiled_llm.compat import compile_with_inductor, note_examples
from compiled_llm.compilation.layer_marks import fill
from compiled_llm.compilation.piecewise import Examples, cut, join, without_symbols

Compiled = Callable[..., Any]
Pass = Callable[[fx.Graph], object]
CompileGraph = Callable[[fx.GraphModule, Sequence[Any], Mapping[str, Any]], Compiled]


class Inductor:
    """Compiles a graph as Dynamo has made it, of a model or of its outline.

    Attributes:
        piecewise: whether equal regions are compiled once.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        passes: Sequence[Pass] = (),
        *,
        piecewise: bool,
        compile_graph: CompileGraph | None = None,
    ) -> None:
        """Prepare.

        Args:
            options: Inductor's.
            passes: each rewrites the whole graph in place, before Inductor sees any of it.
            piecewise: compile equal regions once. Each region costs the host close to 0.1 ms a call, which the replay
                of a CUDA graph does not pay.
            compile_graph: what compiles a graph, or finds it compiled; Inductor with its own cache if None.
        """
        self._options = dict(options)
        self._passes = passes
        self._compile_graph = compile_graph
        self.piecewise = piecewise

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Return the compiled graph; ``inputs`` are those of the first call."""
        fill(module.graph)
        for rewrite in self._passes:
            rewrite(module.graph)
        if not self.piecewise:
            module.recompile()
            return self._compiled(module, inputs)
        return self._compile_piecewise(module)

    def _compile_piecewise(self, module: fx.GraphModule) -> Compiled:
        regions, examples = cut(module), Examples(module)
        known: dict[str, Compiled] = {}
        functions = []
        for region in regions:
            inputs = examples.of(region)
            description = region.describe(inputs)
            compiled_for = without_symbols(description)
            if compiled_for not in known:
                known[compiled_for] = self._compile_region(fx.GraphModule(module, region.graph), inputs)
            functions.append(known[compiled_for])
            examples.follow(region, description)
        return join(regions, functions, module.graph).forward

    def _compile_region(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        note_examples(module.graph, inputs)
        return self._compiled(module, inputs)

    def _compiled(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        return (self._compile_graph or compile_with_inductor)(module, inputs, self._options)
