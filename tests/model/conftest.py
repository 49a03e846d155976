"""Fixtures of the tests of fused weights."""

from __future__ import annotations

import pytest
from torch import fx, nn

from compiled_llm.compilation.passes.products import FusedProducts
from support.fused_heads import Products


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Products:
    seen, run = Products(), FusedProducts.__call__

    def count(graph: fx.Graph) -> int:
        return len(graph.find_nodes(op="call_function", target=nn.functional.linear))

    def counted(self: FusedProducts, graph: fx.Graph) -> None:
        before = count(graph)
        run(self, graph)
        seen.counts.append((before, count(graph)))

    monkeypatch.setattr(FusedProducts, "__call__", counted)
    return seen
