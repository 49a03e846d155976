"""The backend behind ``torch.compile``: our passes over Dynamo's graph, then Inductor, over the whole or in pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from compiled_llm.compat import compile_with_inductor, note_examples
from compiled_llm.compilation.layer_marks import fill
from compiled_llm.compilation.piecewise import Examples, cut, join, without_symbols

Compiled = Callable[..., Any]
Pass = Callable[[fx.Graph], object]


class Inductor:
    """Compiles a graph as Dynamo has made it, of a model or of an outline of one.

    Attributes:
        in_pieces: whether pieces that are alike are compiled once.
    """

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
        self.in_pieces = in_pieces

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Return the compiled graph; ``inputs`` are those of the call that it is compiled for."""
        fill(module.graph)
        for rewrite in self._passes:
            rewrite(module.graph)
        if not self.in_pieces:
            module.recompile()
            return compile_with_inductor(module, inputs, self._options)
        return self._compile_pieces(module)

    def _compile_pieces(self, module: fx.GraphModule) -> Compiled:
        pieces, examples = cut(module), Examples(module)
        known: dict[str, Compiled] = {}
        functions = []
        for piece in pieces:
            takes = examples.of(piece)
            description = piece.describe(takes)
            compiled_for = without_symbols(description)
            if compiled_for not in known:
                known[compiled_for] = self._compile_piece(fx.GraphModule(module, piece.graph), takes)
            functions.append(known[compiled_for])
            examples.follow(piece, description)
        return join(pieces, functions, module.graph).forward

    def _compile_piece(self, module: fx.GraphModule, takes: Sequence[Any]) -> Compiled:
        note_examples(module.graph, takes)
        return compile_with_inductor(module, takes, self._options)
