"""What makes the traces of tests quick changes nothing of them."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.guards import CheckFunctionManager
from torch._subclasses.fake_tensor import FakeTensor

from compiled_llm.compat.torch.dynamo import own_copy
from support.compilation.quick_tracing import MAKERS, hasten_traces

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 13), reason="where tox makes traces quick, torch is 2.13")


@pytest.fixture(autouse=True)
def _hastened(monkeypatch: pytest.MonkeyPatch) -> None:
    hasten_traces(monkeypatch)


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Each operation that is made at once, in ways that it is not, too."""
    for part in (x, x.transpose(0, 1), x.half().float(), (4 * x).long()):
        normed = part * torch.rsqrt(part.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        x = x + nn.functional.linear(normed.reshape(x.shape), weight, bias)
        x = x + torch.rsqrt(part).sum() + part.abs().pow(weight[:, None, None, :1]).mean((0, 2)).sum()
    with torch.autocast("cpu", torch.bfloat16):
        return x + nn.functional.linear(x, weight)


def traced(gradients: bool) -> tuple[list[Any], list[str]]:
    """What Dynamo's graph has and its guards, with a number of rows that is not known."""
    found: list[Any] = []

    def backend(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.extend((node.op, str(node.target), described(node), node.stack_trace) for node in graph.graph.nodes)
        return graph.forward

    x, weight, bias = torch.randn(3, 5, 8), torch.randn(8, 8, requires_grad=True), torch.randn(8)
    torch._dynamo.mark_dynamic(x, 0)
    guards: list[str] = []
    make = CheckFunctionManager.__init__

    def noting(self: Any, code: Any, output_graph: Any, *others: Any, **more: Any) -> None:
        guards.extend(sorted(str(guard.expr) for guard in output_graph.shape_env.guards))
        make(self, code, output_graph, *others, **more)

    with pytest.MonkeyPatch.context() as patch, torch.set_grad_enabled(gradients):
        patch.setattr(CheckFunctionManager, "__init__", noting)
        torch.compile(own_copy(layer), backend=backend, fullgraph=True)(x, weight, bias)
    return found, guards


def described(node: fx.Node) -> Any:
    value = node.meta.get("example_value")
    if not isinstance(value, FakeTensor):
        return str(value)
    return value.dtype, str(value.shape), str(value.stride()), value.requires_grad


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("gradients", [False, True])
def test_graphs_and_guards_are_those_of_slow_traces(gradients: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.compilation.quick_tracing.MAKERS", dict.fromkeys(MAKERS, lambda *_, **__: None))
        expected = traced(gradients)
    assert traced(gradients) == expected


def test_frames_have_the_text_that_they_have_elsewhere() -> None:
    spec = importlib.util.find_spec("traceback")
    assert spec is not None
    assert spec.loader is not None
    slow = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(slow)
    first = traceback.extract_stack()
    second = traceback.extract_stack()
    for stack in (first, second, first):
        assert [*map(stack.format_frame_summary, stack)] == [*map(slow.StackSummary().format_frame_summary, stack)]


def test_settings_are_those_of_the_moment() -> None:
    settings = torch._dynamo.config
    before = settings.recompile_limit
    with settings.patch(recompile_limit=before + 1):
        assert settings.recompile_limit == before + 1
        assert settings.cache_size_limit == before + 1, "another name of it"
    assert settings.recompile_limit == settings.cache_size_limit == before
    with pytest.raises(AttributeError, match="does not exist"):
        settings.no_such_setting  # noqa: B018
