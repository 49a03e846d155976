"""Packed weights of 4 bits that multiply one input, in one launch, wherever they lie."""

# Words along the inputs (GPTQ), or along the outputs (AWQ), of several layers are no one tensor of words, however they
# are laid side by side, and scales of 8 bits (NF4) have an offset for each layer. The op ``packed_linears`` takes them
# as they are, so that nothing is moved or copied.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from compiled_llm.model.packed.stand_in_linear import StandInLinear
from compiled_llm_ops.packed.tilings import fit_together

_WORDS = ("words_by_input", "words_by_output")


def can_be_one(group: Sequence[StandInLinear]) -> bool:
    """Whether one launch can multiply by layers, which cannot lie side by side."""
    first = group[0]
    return (
        first.format.bits == 4
        and (first.format.layout in _WORDS or first.nested is not None)
        and len({own.bias is None for own in group}) == 1
        and fit_together([own.weight for own in group])
    )


def product(
    graph: fx.Graph, products: Sequence[fx.Node], group: Sequence[StandInLinear], bias: fx.Node | None
) -> fx.Node:
    """Return one product in place of those of a group."""
    codes, scales, zeros, nested = ([node.args[place] for node in products] for place in (1, 2, 3, 4))
    optional = ([] if own[0] is None else own for own in (zeros, nested))
    format = group[0].format
    given = (products[0].args[0], codes, scales, *optional, bias, format.code, format.layout, format.inputs)
    return graph.call_function(torch.ops.compiled_llm.packed_linears.default, given, products[0].kwargs)
