"""Products with packed weights overlap with the kernels around them in programs for a GPU."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_llm.compilation.options import passes_for
from compiled_llm.compilation.passes.arguments import arguments_of
from compiled_llm.compilation.passes.overlapping import OverlappingProducts
from compiled_llm.config import WrapConfig
from compiled_llm_ops.packed.contracts import PackedLinear
from compiled_llm_ops.packed.linear import multiply_packed
from support.ops.packed_weights import make


def test_products_are_asked_to_overlap() -> None:
    weight = make("torchao int8", 8, 16).weight

    def step(rows: torch.Tensor) -> torch.Tensor:
        return multiply_packed(rows, weight)

    graph = make_fx(step)(torch.randn(2, 16, device="cpu")).graph
    OverlappingProducts()(graph)
    (node,) = (node for node in graph.nodes if "packed_linear" in str(node.target))
    assert arguments_of(node, PackedLinear).overlap


def test_programs_for_a_gpu_do_so() -> None:
    config, device = WrapConfig(backend="triton"), torch.device("cuda")
    for decodes in (True, False):
        assert any(isinstance(one, OverlappingProducts) for one in passes_for(config, device, [], decodes=decodes))
