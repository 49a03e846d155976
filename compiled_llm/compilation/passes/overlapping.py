"""The pass that lets products with packed weights begin while the previous kernel ends."""

from __future__ import annotations

import torch
from torch import fx

from compiled_llm.compilation.passes.arguments import arguments_of, set_arguments
from compiled_llm_ops.packed.contracts import PackedLinear

_PACKED_LINEAR = torch.ops.compiled_llm.packed_linear.default


class OverlappingProducts:
    """A pass that asks for ``overlap``, which is safe in programs: Inductor's kernels are made to wait, too."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=_PACKED_LINEAR):
            set_arguments(node, arguments_of(node, PackedLinear)._replace(overlap=True))
