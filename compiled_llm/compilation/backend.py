"""The backend of ``torch.compile``: our passes over Dynamo's graph, then Inductor, on the whole graph or piecewise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, fx

from compiled_llm.compat import compile_with_inductor, note_examples
from compiled_llm.compilation.layer_marks import TensorsOf, fill
from compiled_llm.compilation.piecewise import Examples, cut, join, without_symbols

Compiled = Callable[..., Any]
Pass = Callable[[fx.Graph], object]
CompileGraph = Callable[[fx.GraphModule, Sequence[Any], Mapping[str, Any]], Compiled]


def no_tensors(layer: int) -> Sequence[Tensor]:
    """Stand for ``tensors_of`` where no layer is left out.

    Raises:
        AssertionError: one was.
    """
    raise AssertionError(f"layer {layer} was left out")


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
        find_tensors: Callable[[], TensorsOf | None] = lambda: None,
    ) -> None:
        """Prepare.

        Args:
            options: Inductor's.
            passes: each rewrites the whole graph in place, before Inductor sees any of it.
            piecewise: compile equal regions once. Each region costs the host close to 0.1 ms a call, which the replay
                of a CUDA graph does not pay.
            compile_graph: what compiles a graph, or finds it compiled; Inductor with its own cache if None.
            find_tensors: returns what returns the tensors of layers that an outline leaves out, at each call, as long
                as that is there: Dynamo keeps backends for good.
        """
        self._options = dict(options)
        self._passes = passes
        self._compile_graph = compile_graph
        self._find_tensors = find_tensors
        self.piecewise = piecewise

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Return the compiled graph; ``inputs`` are those of the first call."""
        tensors_of = self._find_tensors() or no_tensors
        layers = fill(module, tensors_of)
        for rewrite in self._passes:
            rewrite(module.graph)
        if self.piecewise:
            return _with_tensors(self._compile_piecewise(module), tensors_of, layers)
        module.recompile()
        given = [*inputs, *_tensors(tensors_of, layers)]
        return _with_tensors(self._compiled(module, given), tensors_of, layers)

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


def _with_tensors(compiled: Compiled, tensors_of: TensorsOf, layers: Sequence[int]) -> Compiled:
    """Return what Dynamo is to call: it hands over what it has seen, and the tensors of ``layers`` follow."""
    return (lambda *given: compiled(*given, *_tensors(tensors_of, layers))) if layers else compiled


def _tensors(tensors_of: TensorsOf, layers: Sequence[int]) -> list[Tensor]:
    return list(chain.from_iterable(map(tensors_of, layers)))
