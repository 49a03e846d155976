"""The backend behind ``torch.compile``: our passes over Dynamo's graph, then Inductor, over the whole or in pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from compiled_llm.compat import compile_with_inductor
from compiled_llm.pieces import cut, examples_for, join

Compiled = Callable[..., Any]
Pass = Callable[[fx.Graph], object]


class Inductor:
    """Compiles a graph as Dynamo has made it."""

    def __init__(self, options: Mapping[str, Any], passes: Sequence[Pass] = (), *, in_pieces: bool) -> None:
        """Prepare.

        Args:
            options: Inductor's.
            passes: each rewrites the whole graph in place, before Inductor sees any of it.
            in_pieces: compile pieces that are alike once. Each costs the host close to 0.1 ms at every call, which a
                recorded graph does not pay.
        """
        self._options = dict(options)
        self._passes = passes
        self._in_pieces = in_pieces

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Return the compiled graph; ``inputs`` are those of the call that it is compiled for."""
        for rewrite in self._passes:
            rewrite(module.graph)
        if not self._in_pieces:
            module.recompile()
            return compile_with_inductor(module, inputs, self._options)
        return self._compile_pieces(module)

    def _compile_pieces(self, module: fx.GraphModule) -> Compiled:
        pieces = cut(module)
        known: dict[str, Compiled] = {}
        functions = []
        for piece, examples in zip(pieces, examples_for(pieces, module.graph), strict=True):
            description = piece.describe(examples)
            if description not in known:
                known[description] = compile_with_inductor(piece.module, examples, self._options)
            functions.append(known[description])
        return join(pieces, functions, module.graph).forward
