"""The passes of batch-invariant programs: which operations become ops, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_llm.compilation.backend import Inductor
from compiled_llm.compilation.options import decode_options, prefill_options
from compiled_llm.compilation.passes.invariant import InvariantProducts, InvariantSums
from compiled_llm.config import WrapConfig
from support.ops.recurrent_rows import RecurrentRows

SUM = torch.ops.compiled_llm.invariant_sum.default
LINEAR = torch.ops.compiled_llm.invariant_linear.default


def rewritten(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="fake")(*inputs)
    InvariantSums()(module.graph)
    module.recompile()
    return module


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


TOLD = torch.ops.compiled_llm.gated_delta_rule.default, torch.ops.compiled_llm.causal_conv1d.default


def test_ops_that_know_two_orders_are_told(seed: int) -> None:
    graph, rows = fx.Graph(), RecurrentRows([3, 1], seed=seed)
    for op, args in zip(TOLD, (rows.delta(), rows.conv()), strict=True):
        graph.call_function(op, tuple(args[:9]), dict(zip(args._fields[9:-1], args[9:-1], strict=True)))
    InvariantProducts()(graph)
    assert [node.kwargs["invariant"] for node in graph.nodes] == [True, True]


SUMS: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "sum": (lambda x: x.sum(-1), 1),
    "sum, kept": (lambda x: x.sum(1, keepdim=True), 1),
    "mean": (lambda x: x.mean(-1), 1),
    "root mean square": (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), 1),
    "variance": (lambda x: torch.var_mean(x, -1, correction=0, keepdim=True), 2),
    "variance alone": (lambda x: x.var(-1), 2),
    "integers": (lambda x: x.long().sum(-1), 0),
    "largest": (lambda x: x.amax(-1), 0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_the_last_dimension_become_the_op(name: str, dtype: torch.dtype, seed: int) -> None:
    function, count = SUMS[name]
    values = torch.randn(5, 48).to(dtype)
    module = rewritten(function, values)
    assert targets(module).count(SUM) == count
    other = torch.randn(5, 48).to(dtype)
    torch.testing.assert_close(module(other), function(other))


def test_products_of_numbers_are_no_matmul() -> None:
    """Those of positions and frequencies, which not every PyTorch takes apart before the pass sees them."""
    positions, frequencies = torch.randn(3, 5, 1), torch.randn(3, 1, 7)
    module = rewritten(torch.bmm, positions, frequencies)
    assert targets(module) == [torch.ops.aten.mul.Tensor]
    assert torch.equal(module(positions, frequencies), torch.bmm(positions, frequencies))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(0),
        lambda x: x.sum(),
        lambda x: x.cumsum(-1),
        lambda x: x @ x.t(),
        lambda x: torch.bmm(x[None], x.t()[None]),
    ],
)
def test_what_has_no_op_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"^batch_invariant=True: the model's graph has aten\.\w+"):
        rewritten(function, torch.randn(5, 48))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4, bias=False)
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.second(self.first(rows)), self.weight)


def test_linear_layers_become_the_op(seed: int) -> None:
    """Also those of GPT-2, whose weights are transposed."""
    layers, seen, rows = Layers(), list[fx.Graph](), torch.randn(5, 8)

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        InvariantProducts()(module.graph)
        module.recompile()
        seen.append(module.graph)
        return module.forward

    with torch.no_grad():
        out = torch.compile(layers, backend=backend)(rows)
        torch.testing.assert_close(out, layers(rows))
    (graph,) = seen
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [LINEAR] * 3
    assert [node.args[3] for node in calls] == [True] * 3, "weights may be asked for early"


def test_weights_that_the_graph_computes_are_not_asked_for_early() -> None:
    graph = fx.Graph()
    rows, weight = map(graph.placeholder, ("rows", "weight"))
    part = graph.call_function(torch.ops.aten.as_strided.default, (weight, [4, 8], [8, 1]))
    for own in (weight, part, graph.call_method("t", (part,)), graph.call_function(torch.mul, (weight, 2))):
        graph.call_function(nn.functional.linear, (rows, own))
    graph.call_function(nn.functional.linear, (rows, graph.call_method("mul", (weight, 2))))
    InvariantProducts()(graph)
    assert [node.args[3] for node in graph.nodes if node.target is LINEAR] == [True, True, True, False, False]


@torch.no_grad()
def test_compiled_numbers_are_those_of_a_row_alone_however_graphs_are_fused(seed: int) -> None:
    """Prefill and decode are fused in other ways; whole models are compiled so in `test_invariant_engine.py`."""

    def first(x: Tensor) -> Tensor:
        return nn.functional.silu(x * 1.7 + 0.3)

    def second(x: Tensor, gate: Tensor) -> Tensor:
        return x + gate * 0.7 - x * gate

    def compiled(function: Callable[..., Tensor], one_row: bool) -> Callable[..., Tensor]:
        options = decode_options(
            WrapConfig.from_options({"batch_invariant": True}), torch.device("cpu"), one_row=one_row
        )
        return torch.compile(function, backend=Inductor(options, layers_in_region=0), fullgraph=True)

    rows = torch.randn(23, 100).bfloat16()
    torch._dynamo.mark_dynamic(rows, 0)
    together = compiled(lambda x: second(x, first(x)), one_row=False)(rows)
    parts = compiled(first, one_row=True), compiled(second, one_row=True)
    for row, out in zip(rows.split(1), together, strict=True):
        assert torch.equal(parts[1](row, parts[0](row))[0], out)


@pytest.mark.whole
@torch.no_grad()
def test_numbers_of_a_gated_norm_are_those_of_a_row_alone(seed: int) -> None:
    """Of a prompt, Inductor makes a loop over single numbers of it, and of a row's one over vectors."""
    weight, config, cpu = torch.rand(32), WrapConfig.from_options({"batch_invariant": True}), torch.device("cpu")

    def normed(rows: Tensor) -> Tensor:
        heads, gate = rows.reshape(-1, 32), (rows.exp() + 1).reshape(-1, 32)
        scaled = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (weight * scaled * nn.functional.silu(gate)).reshape(*rows.shape[:2], -1)

    options = prefill_options(config, cpu), decode_options(config, cpu, one_row=True)
    several, one = (
        torch.compile(lambda rows: normed(rows), backend=Inductor(own, layers_in_region=0), fullgraph=True)
        for own in options
    )
    rows = torch.randn(1, 23, 1024)
    alone = torch.cat([one(row) for row in rows.split(1, 1)], 1)
    torch._dynamo.mark_dynamic(rows, 1)
    assert torch.equal(several(rows), alone)
