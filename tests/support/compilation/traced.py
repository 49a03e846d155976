"""Functions over pages, traced as Dynamo traces a model's steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx

from compiled_llm.compilation import backend as inductor
from compiled_llm.compilation.regions import Examples, cut, without_symbols


class Inputs(NamedTuple):
    query: Tensor
    pages: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    plan: Tensor
    workspace: Tensor


def inputs_of(rows: int = 3) -> Inputs:
    columns = [torch.arange(size, dtype=torch.int32) for size in (rows + 1, rows)]
    return Inputs(
        torch.randn(rows, 4, 16),
        torch.randn(rows + 5, 2, 2, 4, 16),
        *columns,
        torch.ones(rows, dtype=torch.int32),
        *torch.zeros(2, 16, dtype=torch.uint8),
    )


def graphs_for_inductor(patch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Return the graphs that Inductor is given from now on; they run as they are."""
    given: list[fx.GraphModule] = []

    def noted(module: fx.GraphModule, inputs: Any, options: Any) -> Callable[..., Any]:
        given.append(module)
        return module.forward

    patch.setattr(inductor, "compile_with_inductor", noted)
    return given


def traced(function: Callable[..., Any], *inputs: Any) -> tuple[fx.GraphModule, list[Any]]:
    """The graph, and what it is called with."""
    graphs: list[tuple[fx.GraphModule, list[Any]]] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append((module, []))

        def run(*args: Any) -> Any:
            graphs[-1][1].extend(args)
            return module.forward(*args)

        return run

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, fullgraph=True, dynamic=False, backend=backend)(*inputs)
    (found,) = graphs
    return found


def descriptions_of(module: fx.GraphModule) -> list[str]:
    """What tells the regions of a graph apart, without symbols."""
    examples, found = Examples(module), []
    with torch.no_grad():  # as its model runs
        for region in cut(module):
            description = region.describe(examples.of(region))
            examples.follow(region, description)
            found.append(without_symbols(description))
    return found
