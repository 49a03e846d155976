"""Matmuls of few rows, and the norms around them, on a GPU: as exact as cuBLAS, and never before what they read.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.compat.torch.inductor import make_kernels_wait_first
from compiled_llm_ops import add_rms_norm, chained_linear, normed_linear, skinny_linear
from compiled_llm_ops.kernels.linear import skinny_tiling as tiling
from compiled_llm_ops.kernels.linear.chained_tiling import chained_tiling_for
from support.gpu import by_dtype, close, needs_cuda, seeded

pytestmark = [pytest.mark.gpu, needs_cuda]

# ---- skinny_linear

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="cuBLAS does it all"
)
WEIGHTS = [(1024, 1024), (1024, 3072), (2064, 2048), (4096, 1024), (4096, 4096), (4096, 12288), (6144, 1024)]
WEIGHTS += [(6144, 4096), (24576, 4096), (151936, 1024), (576, 1536), (49152, 576), (1152, 896)]
LEFT_TO_CUBLAS = [(1023, 1024), (4096, 4000), (24, 128), (2048, 1000)]
EDGES = [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 112, 128, 192, 256, 500, 512, 513]

by_weight = pytest.mark.parametrize(("n", "k"), WEIGHTS + LEFT_TO_CUBLAS)


def product_of(m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = torch.randn(m, k, device="cuda", generator=generator).to(dtype)
    return rows, (torch.randn(n, k, device="cuda", generator=generator) * k**-0.5).to(dtype)


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@seeded
@by_dtype
@by_weight
def test_skinny_linear_is_as_exact_as_cublas(n: int, k: int, dtype: torch.dtype, seed: int) -> None:
    all_rows, weight = product_of(EDGES[-1], n, k, dtype, seed)
    for m in EDGES:
        rows = all_rows[:m]
        exact = rows.float().double() @ weight.double().T if n * k < 2**25 else rows.float() @ weight.float().T
        ours, cublas = skinny_linear(rows, weight), torch.mm(rows, weight.T)
        assert rms(ours - exact) <= 1.1 * rms(cublas - exact), m
        assert torch.allclose(ours.double(), exact.double(), rtol=0.02, atol=0.02), m
        for _ in range(5):
            assert torch.equal(ours, skinny_linear(rows, weight)), m


@seeded
@hopper
def test_skinny_linear_leaves_what_does_not_fit_to_cublas(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled_llm_ops.kernels.linear import skinny as triton_linear

    tilings: list[tiling.LinearTiling] = []
    multiply = triton_linear.multiply

    def noted(*given: Any, **options: Any) -> Tensor:
        tilings.append(given[2])
        return multiply(*given, **options)

    monkeypatch.setattr(triton_linear, "multiply", noted)
    rows, weight = product_of(65, 4096, 4096, torch.bfloat16, seed)
    for given in (
        (rows, weight),  # too many rows
        (rows[:8], weight[1:]),  # an odd number of outputs
        (rows[:8, 1:], weight[:, 1:].contiguous()),  # and of inputs
        (rows[:8], weight.T.contiguous().T),
        (rows[:8], torch.cat([weight.flatten(), weight[0]])[1:][: weight.numel()].view_as(weight)),  # not aligned
        (rows[:8].float(), weight.float()),
    ):
        torch.testing.assert_close(skinny_linear(*given), torch.mm(given[0], given[1].T))
    assert not tilings
    for given in ((rows[:8], weight), (rows[:8].T.contiguous().T, weight), (rows[::9], weight)):
        torch.testing.assert_close(skinny_linear(*given), torch.mm(given[0], given[1].T), rtol=0.02, atol=0.02)
    assert (
        tilings
        == [tiling.choose_linear_tiling(8, 4096, 4096, torch.cuda.get_device_properties(0).multi_processor_count)] * 3
    )


@seeded
@hopper
@pytest.mark.parametrize(("n", "k"), [(1024, 3072), (4096, 4096), (6144, 1024)])
def test_skinny_linear_replays_on_several_streams_at_once(n: int, k: int, seed: int) -> None:
    """CudaGraphs from one stream, replayed on others at the same time, with launches outside of them in between."""
    given = [product_of(m, n, k, torch.bfloat16, seed + m) for m in (1, 2, 8, 16, 32, 64)]
    expected = [skinny_linear(rows, weight) for rows, weight in given]
    cuda_graph, graphs, outputs = torch.cuda.Stream(), [], []
    for rows, weight in given:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=cuda_graph):
            outputs.append([skinny_linear(rows + 0, weight, overlap=True) for _ in range(20)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for repeat in range(30):
        for outs in outputs:
            for out in outs:
                out.fill_(float("nan"))
        torch.cuda.synchronize()
        eager = []
        for stream, graph, (rows, weight) in zip(streams, graphs, given, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                eager.append(skinny_linear(rows, weight))
                graph.replay()
        torch.cuda.synchronize()
        for outs, launched, out in zip(outputs, eager, expected, strict=True):
            assert all(torch.equal(one, out) for one in [*outs, launched]), repeat


@seeded
@hopper
@pytest.mark.parametrize("m", [1, 2, 8, 32, 64])
def test_skinny_linear_waits_for_what_is_in_front_of_it(m: int, seed: int) -> None:
    """Chains of products, each of which reads what the one before wrote, between kernels that let go early."""
    rows, weight = product_of(m, 4096, 4096, torch.bfloat16, seed)

    def chain(rows: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        for _ in range(12):
            rows = torch.nn.functional.rms_norm(product(rows, weight) + rows, (4096,))
        return rows

    def overlapping(rows: Tensor, weight: Tensor) -> Tensor:
        return skinny_linear(rows, weight, overlap=True)

    make_kernels_wait_first()
    compiled = torch.compile(chain, options={"triton.enable_pdl": True}, fullgraph=True)
    expected = compiled(rows, overlapping)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(rows, overlapping)
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
    exact = chain(rows.double(), lambda rows, weight: rows @ weight.double().T)
    cublas = chain(rows, lambda rows, weight: torch.mm(rows, weight.T))
    assert rms(expected - exact) <= 1.2 * rms(cublas - exact)


# ---- normed_linear


def norm_of(k: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    states, update = torch.randn(2, 1, 1, k, device="cuda", generator=generator).to(dtype)
    return states, update, (torch.rand(k, device="cuda", generator=generator) + 0.5).to(dtype)


@seeded
@by_dtype
@by_weight
@pytest.mark.parametrize("gated", [False, True], ids=["outputs", "gated"])
def test_normed_linear_is_as_exact_as_its_parts(n: int, k: int, gated: bool, dtype: torch.dtype, seed: int) -> None:
    if gated and n % 2:
        pytest.skip("no halves")
    _, weight = product_of(1, n, k, dtype, seed)
    states, update, norm = norm_of(k, dtype, seed)
    total, ours = normed_linear(states, update, norm, 1e-6, weight, gated)
    assert torch.equal(total, states + update)

    def multiplied(row: Tensor) -> Tensor:
        product = row @ weight.to(row.dtype).T
        if not gated:
            return product
        first, second = product.chunk(2, -1)
        return torch.nn.functional.silu(first) * second

    exact = multiplied(torch.nn.functional.rms_norm(total.double(), (k,), norm.double(), 1e-6))
    parts = multiplied(add_rms_norm(states, update, norm, 1e-6)[1])
    assert ours.shape == exact.shape
    assert rms(ours - exact) <= 1.1 * rms(parts - exact)
    for _ in range(5):
        again = normed_linear(states, update, norm, 1e-6, weight, gated)
        assert all(map(torch.equal, again, (total, ours)))


def check_overlapped(chain: Callable[[bool], Tensor]) -> None:
    """A chain of kernels, called with whether they overlap, gives the same bits either way, at each replay."""
    expected = chain(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(True)
    for _ in range(50):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@seeded
@hopper
@pytest.mark.parametrize("inputs", [1024, 4096, 8192], ids="I={}".format)
def test_normed_linear_waits_for_what_is_in_front_of_it(inputs: int, seed: int) -> None:
    """Chains of layers that read what the one before wrote, whose kernels let go before they have waited."""
    states, update, norm = norm_of(inputs, torch.bfloat16, seed)
    _, up = product_of(1, 2 * inputs, inputs, torch.bfloat16, seed)
    _, down = product_of(1, inputs, inputs, torch.bfloat16, seed + 1)

    def chain(overlap: bool) -> Tensor:
        total, out = states, update
        for _ in range(12):
            total, row = normed_linear(total, out, norm, 1e-6, up, True, overlap)
            out = skinny_linear(row[0], down, overlap, ahead=True)[None]
        return add_rms_norm(total, out, norm, 1e-6, overlap)[1]

    check_overlapped(chain)


# ---- chained_linear

PAIRS = {
    "0.6B, gate and up": ((1024, 2048), 6144, True),
    "0.6B, next layer": ((1024, 3072), 4096, False),
    "1.7B, gate and up": ((2048, 2048), 12288, True),
    "left to others": ((576, 1536), 960, False),
}
by_pair = pytest.mark.parametrize(("first", "outputs", "gated"), PAIRS.values(), ids=PAIRS)


def chain_of(m: int, first: tuple[int, int], outputs: int, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    """Rows, weight, states, norm, epsilon and the second weight, of a layer whose sums are of one size."""
    rows, weight = product_of(m, *first, dtype, seed)
    states, next_weight = product_of(m, outputs, first[0], dtype, seed + 1)
    return rows, weight, states, norm_of(first[0], dtype, seed)[2], 1e-6, next_weight


@seeded
@by_dtype
@by_pair
def test_chained_linear_is_as_exact_as_its_parts(
    first: tuple[int, int], outputs: int, gated: bool, dtype: torch.dtype, seed: int
) -> None:
    *given, next_weight = chain_of(260, first, outputs, dtype, seed)
    for m in (1, 2, 3, 15, 16, 17, 40, 64, 65, 100, 128, 129, 200, 256, 260):
        rows, weight, states, norm, epsilon = (given[0][:m], given[1], given[2][:m], *given[3:])
        total, ours = chained_linear(rows, weight, states, norm, epsilon, next_weight, gated)
        _, parts = normed_linear(states, skinny_linear(rows, weight), norm, epsilon, next_weight, gated)
        exact_total = states.double() + rows.double() @ weight.double().T
        assert torch.allclose(total.double(), exact_total, rtol=0.02, atol=0.02), m
        normed = torch.nn.functional.rms_norm(exact_total, (first[0],), norm.double(), epsilon)
        exact = normed @ next_weight.double().T
        if gated:
            exact = torch.nn.functional.silu(exact[:, : outputs // 2]) * exact[:, outputs // 2 :]
        assert rms(ours - exact) <= 1.1 * rms(parts - exact), m
        for _ in range(5):
            again = chained_linear(rows, weight, states, norm, epsilon, next_weight, gated)
            assert all(map(torch.equal, again, (total, ours))), m


@hopper
@by_pair
def test_rows_in_bfloat16_have_kernels(first: tuple[int, int], outputs: int, gated: bool, seed: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        _, weight, *_, next_weight = chain_of(1, first, outputs, dtype, seed)
        ours = [rows for rows in range(1, 300) if chained_tiling_for(rows, weight, next_weight, gated) is not None]
        fits = dtype is torch.bfloat16 and first[0] > 576
        assert ours == (list(range(2, 257)) if fits else [])


@seeded
@hopper
@pytest.mark.parametrize("m", [2, 8, 16, 40, 64, 100, 130, 256], ids="M={}".format)
def test_chained_linear_waits_for_what_is_in_front_of_it(m: int, seed: int) -> None:
    """Layers of Qwen3-0.6B without attention, each of which reads what the one before wrote."""
    rows, out, states, norm, _, up = chain_of(m, (1024, 2048), 6144, torch.bfloat16, seed)
    _, down, _, _, _, qkv = chain_of(m, (1024, 3072), 4096, torch.bfloat16, seed + 1)

    def chain(overlap: bool) -> Tensor:
        total, attended = states, rows
        for _ in range(12):
            total, row = chained_linear(attended, out, total, norm, 1e-6, up, True, overlap)
            total, row = chained_linear(row, down, total, norm, 1e-6, qkv, False, overlap)
            attended = row[:, :2048].contiguous()
        return torch.cat([total, attended], 1)

    check_overlapped(chain)


# ---- add_rms_norm


@seeded
@by_dtype
@pytest.mark.parametrize("shape", [(1, 1024), (64, 1, 4096), (3, 5000)], ids=str)
def test_sums_are_normed(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    states, update, weight = (torch.randn(size, generator=generator).to(dtype) for size in (shape, shape, shape[-1:]))
    total, normed = add_rms_norm(states.cuda(), update.cuda(), weight.cuda(), 1e-6)
    expected_total, expected = add_rms_norm(states, update, weight, 1e-6)
    assert torch.equal(total.cpu(), expected_total)
    close(normed.cpu().float(), expected.float(), 1e-3 if dtype is torch.float16 else 8e-3, "normed")
