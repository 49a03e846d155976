"""Passes over compiled graphs: applied where they should be, and only there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import compiled_llm
import compiled_llm_ops
from compiled_llm import compat
from compiled_llm.compilation.passes import products
from compiled_llm.compilation.passes.empty_parts import copy_lone_parts
from compiled_llm.compilation.passes.patches import multiply_patches
from compiled_llm.compilation.passes.products import SkinnyProducts
from compiled_llm_ops import normed_linear
from compiled_llm_ops.kernels.linear import skinny_tiling
from compiled_llm_ops.linear import chained_linear, linear
from support.compilation.traced import traced

pytestmark = pytest.mark.core


def code_of(function: object, *args: Tensor) -> tuple[Tensor, str]:
    torch._dynamo.reset()
    compiled = torch.compile(function, options={"post_grad_custom_pre_pass": SkinnyProducts()})  # type: ignore[call-overload]
    with torch.no_grad():
        out, (code,) = run_and_get_code(compiled, *args)
    return out, code


@pytest.fixture
def slow_mkl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor is one on which torch's own product is not the fastest."""
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: True)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_products_with_weights_become_skinny_linear(rows, slow_mkl, seed):
    x, weight, bias = torch.randn(rows, 24), torch.randn(16, 24), torch.randn(16)
    for function, arguments in (
        (torch.nn.functional.linear, (x, weight)),
        (torch.nn.functional.linear, (x[None], weight)),
        (torch.nn.functional.linear, (x, weight, bias)),
    ):
        out, code = code_of(function, *arguments)
        assert "compiled_llm.skinny_linear" in code
        torch.testing.assert_close(out, function(*arguments), rtol=1e-5, atol=1e-5)


def test_a_product_with_several_weights_in_one_storage_becomes_skinny_linear(slow_mkl, seed):
    x, storage = torch.randn(3, 24), torch.randn(16, 24)

    def product(x: Tensor, first: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, torch.ops.aten.as_strided.default(first, [16, 24], [24, 1]))

    out, code = code_of(product, x, storage[:6])
    assert "compiled_llm.skinny_linear" in code
    torch.testing.assert_close(out, x @ storage.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_products_are_left_to_torch_where_its_own_is_the_fastest(rows, monkeypatch, seed):
    monkeypatch.setattr(linear, "mkl_is_slow", lambda: False)
    x, weight = torch.randn(rows, 24), torch.randn(16, 24)
    out, code = code_of(torch.nn.functional.linear, x, weight)
    assert "compiled_llm.skinny_linear" not in code
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-5, atol=1e-5)


def test_other_products_are_left_alone(slow_mkl, seed):
    x, weight = torch.randn(3, 24), torch.randn(16, 24)
    for function, arguments in (
        (torch.mm, (x, weight.T.contiguous())),
        (lambda x, y: torch.mm(x, (y * 2).T), (x, weight)),
        (torch.nn.functional.linear, (x.bfloat16(), weight.bfloat16())),
    ):
        out, code = code_of(function, *arguments)
        assert "compiled_llm.skinny_linear" not in code
        torch.testing.assert_close(out, function(*arguments))


def test_the_compile_cache_forgets_a_graph_when_a_rule_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rule that is not among the files would let an old graph serve the new rule."""
    rules = {file.resolve() for file in products.rule_files()}
    passes = set(Path(str(compiled_llm.compilation.passes.__file__)).resolve().parent.glob("*.py"))
    tilings = set(Path(str(compiled_llm_ops.__file__)).resolve().parent.rglob("*tiling.py"))
    private = set(Path(str(compat.__file__)).resolve().parent.rglob("*.py"))
    assert min(len(passes), len(private)) > 4
    assert len(tilings) > 1
    kernels = {Path(str(module.__file__)).resolve() for module in (linear, chained_linear)}
    assert passes | tilings | private | kernels == rules
    uuids = []
    for name, text in (("one", "a rule"), ("another", "a rule"), ("changed", "a rule, changed")):
        file = tmp_path / name
        file.write_text(text)
        monkeypatch.setattr(products, "rule_files", lambda file=file: [file])
        uuids.append(SkinnyProducts().uuid())
    assert uuids[0] == uuids[1] != uuids[2]


# ---- on CUDA, with fake tensors

aten = torch.ops.aten


def product(rows: Tensor, weight: Tensor) -> Tensor:
    return aten.mm.default(rows, aten.permute.default(weight, [1, 0]))


def product_with_bias(rows: Tensor, weight: Tensor) -> Tensor:
    return aten.addmm.default(aten.select.int(weight, 1, 0), rows, aten.permute.default(weight, [1, 0]))


def product_with_several(rows: Tensor, weight: Tensor) -> Tensor:
    return product(rows, aten.as_strided.default(weight, [2 * weight.shape[0], weight.shape[1]], weight.stride()))


def product_with_some(rows: Tensor, weight: Tensor) -> Tensor:
    return product(rows, aten.slice.Tensor(weight, 0, 2048, 4096))


def product_with_few_inputs(rows: Tensor, weight: Tensor) -> Tensor:
    return product(aten.slice.Tensor(rows, 1, 0, 1024), aten.slice.Tensor(weight, 1, 0, 1024))


def product_with_computed(rows: Tensor, weight: Tensor) -> Tensor:
    return product(rows, aten.mul.Tensor(weight, 2))


def products_of(function: object, shape: tuple[int, int], dtype: torch.dtype) -> fx.Graph:
    with FakeTensorMode():
        rows = torch.empty(4, shape[1], dtype=dtype, device="cuda")
        weight = torch.empty(shape, dtype=dtype, device="cuda")
        module: fx.GraphModule = make_fx(function, tracing_mode="fake")(rows, weight)  # type: ignore[arg-type]
    SkinnyProducts()(module.graph)
    module.graph.lint()
    return module.graph


def is_rewritten(graph: fx.Graph) -> bool:
    return bool(graph.find_nodes(op="call_function", target=torch.ops.compiled_llm.skinny_linear.default))


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(skinny_tiling, "processors_of", lambda device: 132 if device.type == "cuda" else 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "function", [product, product_with_bias, product_with_several, product_with_some], ids=lambda f: f.__name__
)
def test_on_cuda_products_that_have_a_kernel_become_skinny_linear(function, dtype, hopper):
    graph = products_of(function, (4096, 4096), dtype)
    assert is_rewritten(graph)
    (out,) = graph.find_nodes(op="output")
    value = out.args[0].meta["val"]
    assert (value.dtype, value.shape[0]) == (dtype, 4)


@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (product, (4096, 4096), torch.float32),
        (product, (4096, 4001), torch.bfloat16),
        (product_with_computed, (4096, 4096), torch.bfloat16),
        (product_with_few_inputs, (4096, 4096), torch.bfloat16),
    ],
    ids=["float32", "odd inputs", "no graph input", "not contiguous"],
)
def test_on_cuda_other_products_stay_as_they_are(function, shape, dtype, hopper):
    assert not is_rewritten(products_of(function, shape, dtype))


@pytest.mark.parametrize("shape", [(4097, 4096), (4096, 4000), (12288, 4096)], ids=str)
def test_on_cuda_products_with_a_kernel_for_one_row_alone_become_skinny_linear(shape, hopper):
    """The op leaves more rows to cuBLAS."""
    assert is_rewritten(products_of(product, shape, torch.bfloat16))


def test_without_a_device_that_the_kernels_are_for_products_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(skinny_tiling, "processors_of", lambda device: 0)
    assert not is_rewritten(products_of(product, (4096, 4096), torch.bfloat16))


def product_behind_a_normed_one(rows: Tensor, weight: Tensor) -> Tensor:
    _, out = normed_linear(rows, rows, aten.select.int(weight, 0, 0), 1e-6, weight)
    return product(aten.reshape.default(out, [4, 4096]), weight)


@pytest.mark.parametrize(
    ("function", "ahead"), [(product_behind_a_normed_one, True), (product, False)], ids=["normed product", "input"]
)
def test_what_reads_a_normed_product_lets_the_next_kernel_go_ahead(function, ahead, hopper):
    graph = products_of(function, (4096, 4096), torch.bfloat16)
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.compiled_llm.skinny_linear.default)
    assert node.args[2:] == (True, ahead)


@pytest.mark.whole
def test_compiled_products_behind_a_normed_one_let_the_next_kernel_go_ahead_too(slow_mkl, seed):
    def layer(states: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        total, out = normed_linear(states, states, norm, 1e-6, weight, True)
        return torch.nn.functional.linear(out, weight) + total.sum()

    inputs = (torch.randn(1, 1, 16), torch.rand(16), torch.randn(32, 16))
    out, code = code_of(layer, *inputs)
    assert re.search(r"skinny_linear\.default\(.*, True, True\)", code)
    torch.testing.assert_close(out, layer(*inputs), rtol=1e-5, atol=1e-5)


# ---- convolutions of patches


def convolved(patches: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.conv3d(patches, weight, bias, stride=(2, 4, 4)).flatten(1)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("size", "left"), [(4, 0), (8, 1)], ids=["whole patches", "several places"])
def test_convolutions_of_whole_patches_are_products(size, left, with_bias, seed):
    patches, weight = torch.randn(5, 3, 2, size, size), torch.randn(7, 3, 2, 4, 4)
    bias = torch.randn(7) if with_bias else None
    module, inputs = traced(convolved, patches, weight, bias)
    multiply_patches(module.graph)
    module.recompile()
    assert len(module.graph.find_nodes(op="call_function", target=torch.conv3d)) == left
    (found,) = module(*inputs)
    torch.testing.assert_close(found, convolved(patches, weight, bias))


# ---- empty parts


def joined(rows: Tensor, empty: Tensor) -> Tensor:
    return torch.cat([rows.transpose(1, 2), empty], dim=1)


@pytest.mark.parametrize(("sizes", "left"), [((0,), 0), ((2, 0, 3), 0), ((2, 1, 3), 1)], ids=str)
def test_what_is_joined_with_nothing_is_a_contiguous_copy(sizes, left, seed):
    rows, empty = torch.randn(2, 3, 4), torch.randn(sizes)
    module, inputs = traced(joined, rows, empty)
    copy_lone_parts(module.graph)
    module.recompile()
    assert len(module.graph.find_nodes(op="call_function", target=torch.cat)) == left
    (found,) = module(*inputs)
    torch.testing.assert_close(found, joined(rows, empty))
    assert found.is_contiguous()
