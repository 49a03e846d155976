"""The batch-invariant kernels under Triton's interpreter on the CPU, and compiled; on a GPU see
`test_invariant_gpu.py`.
"""

from __future__ import annotations

import contextlib
import random
import re

import pytest
import torch
from torch import Tensor

from compiled_llm_ops.contracts import DecodeAttention, PagedAttention
from compiled_llm_ops.kernels.attention.invariant_tiling import ONE_TOKEN, invariant_decode_tiling, invariant_tiling
from compiled_llm_ops.kernels.attention.packed_tiling import PackedTiling
from compiled_llm_ops.kernels.linear.invariant_tiling import TILES, LinearDevice, invariant_linear_tiling
from support.ops.compiling import compiled, in_order, resources_of
from support.ops.fp8_pages import KINDS, Fp8Batch
from support.ops.interpreting import interpreted, needs_triton, not_interpreted
from support.ops.invariant_rows import InvariantRows, Span
from support.ops.op_cases import MIXES

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

LENGTHS = [1, 17, 63, 64, 65, 130]
HALF = {"dtype": torch.half, "head_dim": 64, "page_size": 16}

H200, ANOTHER = LinearDevice(228 * 1024, 132, hopper=True), LinearDevice(164 * 1024, 108, hopper=False)

SMALL = PackedTiling(16, 64, 3, 4, fuses=False, ordered=True)
"""So small that rows have several tiles."""


def by_kernel(args: PagedAttention) -> tuple[Tensor, Tensor]:
    """Prefill by a launch of the kernel with a table, as the backend's plan launches it."""
    from compiled_llm_ops.kernels.attention.packed import PackedQueries, attend

    out, lse = torch.full_like(args.query, torch.nan), torch.full(args.query.shape[:2], torch.nan)
    attend(PackedQueries.of(args), out, lse, SMALL)
    return out, lse


def by_op(*arguments: object, **options: object) -> tuple[Tensor, Tensor]:
    """Decode as the op launches it on CUDA."""
    from compiled_llm_ops.attention import invariant

    out, lse = invariant._cuda(DecodeAttention(*arguments, **options), True)
    assert lse is not None
    return out, lse


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is for CUDA launches on tensors of the CPU, with the tiling of `by_kernel`."""
    from compiled_llm_ops.kernels.attention import invariant_tiling as tilings

    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(tilings, "invariant_tiling", lambda _: SMALL)


@pytest.mark.drawn
@interpreted
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, {}),
        ({"window_left": 5}, {"group": 1}),
        ({"window_left": 70}, {"group": 3}),
        ({"logits_soft_cap": 1.5, "window_left": 128}, {"group": 7}),
        ({}, {"head_dim": 24, "stored": 64, "page_size": 5}),
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_in_any_batch(options, sizes, seed, whole):
    rows = InvariantRows(LENGTHS, **{**HALF, **sizes}, **options)
    rows.check_all_ways(seed, by_kernel, by_op, batches=3 if whole else 1)


@interpreted
def test_pages_before_all_windows_may_be_free(seed):
    rows = InvariantRows([200], **HALF, window_left=70)
    alone = rows.alone(by_kernel)
    for number in rows.own[0][: (150 - 70) // rows.page_size]:
        rows.pages[number] = torch.nan
    span = Span(0, 150, 200)
    rows.check([span], rows.prefill([span], by_kernel), alone)


@interpreted
@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("kind", KINDS)
def test_pages_may_be_of_fp8(kind, seed):
    batch = Fp8Batch(*MIXES["several new tokens"], kind=kind, head_dim=64, dtype=torch.half, seed=seed).filled()
    given = batch.scales.given
    out, lse = by_op(*batch.decode_arguments(), 3, 1.5, **given)
    torch.testing.assert_close(out.float(), batch.read().expected(batch.scale, 3, 1.5), rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(lse, batch.expected_lse(batch.scale, 3, 1.5), rtol=2e-3, atol=2e-3)
    assert given["saturated"].tolist() == [batch.clamped(3)]


@pytest.mark.drawn
@interpreted
@pytest.mark.parametrize("dtype", [torch.half, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (48, 100), (200, 96)])
def test_rows_are_multiplied_with_the_same_bits_in_any_batch(outputs, inputs, dtype, seed):
    from compiled_llm_ops.kernels.linear.invariant import multiply

    rows, weight, bias = (torch.randn(*size).to(dtype) for size in ((150, inputs), (outputs, inputs), (outputs,)))
    tiling = invariant_linear_tiling(150, outputs, dtype.itemsize, ANOTHER)
    for own in (None, bias):
        whole = multiply(rows, weight, own, tiling)
        expected = rows.double() @ weight.double().T + (0 if own is None else own.double())
        torch.testing.assert_close(whole.double(), expected, rtol=2e-3, atol=5e-2 if dtype == torch.half else 1e-4)
        transposed = multiply(rows, weight.T.contiguous().T, own, tiling)  # read in another way
        torch.testing.assert_close(transposed, whole, rtol=1e-2 if dtype == torch.half else 1e-5, atol=1e-2)
        for places in ([3], [149, 0], random.Random(seed).sample(range(150), 70)):
            assert torch.equal(multiply(rows[places], weight, own, tiling), whole[places])


@interpreted
@pytest.mark.parametrize("dtype", [torch.half, torch.float32], ids=str)
def test_rows_of_heads_are_multiplied_with_the_same_bits_in_any_batch(dtype, seed):
    from compiled_llm_ops.kernels.linear.invariant import multiply_each

    rows, matrices = torch.randn(70, 3, 48).to(dtype).transpose(0, 1), torch.randn(3, 100, 48).to(dtype).mT
    whole = multiply_each(rows, matrices)
    torch.testing.assert_close(whole.double(), rows.double() @ matrices.double(), rtol=2e-3, atol=2e-2)
    for places in ([3], [69, 0], random.Random(seed).sample(range(70), 65)):
        assert torch.equal(multiply_each(rows[:, places], matrices), whole[:, places])


@interpreted
@pytest.mark.parametrize("number", range(len(TILES)))
def test_each_tiling_multiplies(number, seed):
    """Whether they have equal bits, a GPU's tensor cores decide."""
    from compiled_llm_ops.kernels.linear.invariant import multiply

    rows, weight, bias = (torch.randn(*size).half() for size in ((37, 96), (200, 96), (200,)))
    product = multiply(rows, weight, bias, TILES[number])
    torch.testing.assert_close(product.double(), rows.double() @ weight.double().T + bias, rtol=2e-3, atol=5e-2)


def test_tilings_follow_from_rows_where_that_keeps_bits():
    """A tile has room for the rows there are, and few rows are not padded to many."""
    rows = [1, 16, 17, 64, 256, 2048]
    chosen = [invariant_linear_tiling(own, 4096, 2, H200) for own in rows]
    assert [tiling.rows for tiling in chosen] == [16, 16, 16, 32, 64, 256]
    assert len({invariant_linear_tiling(own, 4096, 2, ANOTHER) for own in rows}) == 1
    assert len({invariant_linear_tiling(own, 4096, 4, H200) for own in rows}) == 1
    assert len({invariant_linear_tiling(own, 4096, 2, H200, described=False) for own in rows}) == 1


@interpreted
@pytest.mark.parametrize("inputs", [1, 100, 1024, 2500])
def test_rows_are_added(inputs, seed):
    from compiled_llm_ops.kernels.linear.invariant import sum_rows

    values = torch.randn(9, inputs)
    sums = sum_rows(values)
    torch.testing.assert_close(sums, values.double().sum(-1).float(), rtol=1e-5, atol=1e-4)
    assert torch.equal(sum_rows(values[4:5].clone()), sums[4:5])


def _reductions(code: str) -> str:
    """What reductions over threads do, in Triton's code for a GPU."""
    return "".join(re.findall(r'"tt\.reduce".*?tt\.reduce\.return', code, re.DOTALL))


@pytest.mark.drawn
@not_interpreted
@pytest.mark.parametrize("rows", [0, 1, 256], ids=lambda rows: f"{rows} rows of a token")
@pytest.mark.parametrize(("head_dim", "gqa"), [(64, 3), (128, 2), (256, 8)])
def test_the_attention_compiles_for_hopper_without_spilling(head_dim, gqa, rows, tmp_path):
    from compiled_llm_ops.kernels.attention import packed as module

    decodes, tiling = rows > 0, invariant_decode_tiling(head_dim, gqa, 8 * rows, H200.processors)
    tables = ("starts", "lengths", "indices") if decodes else ("qo_indptr", "starts", "last_page_len", "indices")
    types = dict.fromkeys(("query", "pages", "out"), "*bf16") | dict.fromkeys(tables, "*i32")
    types |= dict.fromkeys(("row_stride", "head_stride", "rows", "window_left"), "i32") | {
        "scale": "fp32",
        "cap": "fp32",
    }
    constants = {
        "QUERIES": tiling.queries, "GQA": gqa, "KV_HEADS": 8, "HEAD": head_dim, "DIM": head_dim, "PAGE": 16,
        "KEYS": tiling.keys, "STAGES": tiling.stages, "WINDOWED": True, "CAPPED": False, "NEW": int(decodes),
        "PDL": decodes, "ORDERED": tiling.ordered,
    }  # fmt: skip
    kernel = compiled(
        module._packed_attention, constants, types, tiling.warps, ("pages", "out"), enable_fp_fusion=False
    )
    assert ("wgmma" in kernel.asm["ptx"]) == (tiling != ONE_TOKEN)
    assert "arith.addf" not in _reductions(kernel.asm["ttgir"]), "tensor cores add, whose order no tiling changes"
    assert "STACK:0" in resources_of(kernel.asm["cubin"], tmp_path / "kernel.cubin")


def test_tiles_are_small_where_rows_of_one_token_fill_the_device():
    """The order of the sums is that of the keys of a tile, so all have as many."""
    for head_dim in (64, 128):
        large = invariant_tiling(head_dim)
        assert invariant_decode_tiling(head_dim, 2, 8 * 256, 132) == ONE_TOKEN
        assert invariant_decode_tiling(head_dim, 32, 8 * 256, 132) == large
        assert invariant_decode_tiling(head_dim, 2, 8 * 16, 132) == large
        assert (large.keys, large.fuses, large.ordered) == (ONE_TOKEN.keys, ONE_TOKEN.fuses, ONE_TOKEN.ordered)
    assert invariant_decode_tiling(256, 2, 8 * 256, 132) == invariant_tiling(256)


@not_interpreted
@pytest.mark.parametrize("number", range(len(TILES)))
def test_the_matmul_compiles_for_hopper_without_spilling(number, tmp_path):
    from compiled_llm_ops.kernels.linear import invariant as module

    tiling = TILES[number]
    tiles = {"x": tiling.rows, "w": tiling.outputs}
    types = {name: f"tensordesc<bf16[{size},{tiling.inputs}]>" for name, size in tiles.items()} | {"y": "*bf16"}
    types |= dict.fromkeys(("M", "N", "K", "output_stride"), "i32")
    constants = {
        "ROWS": tiling.rows, "OUTPUTS": tiling.outputs, "INPUTS": tiling.inputs, "STAGES": tiling.stages, "GROUPED": 8,
        "input_stride": 1, "DESCRIBED": True, "SWAPPED": tiling.swapped, "PDL": True,
    }  # fmt: skip
    kernel = compiled(module._invariant_linear, constants, types, tiling.warps, aligned=("y", "N", "K"))
    steps = in_order(kernel.asm["ptx"])
    assert steps[: steps.index("griddepcontrol.wait")] == ["cp.async.bulk"], "weights are asked for before the wait"
    assert "wgmma" in kernel.asm["ptx"]
    assert "STACK:0" in resources_of(kernel.asm["cubin"], tmp_path / "kernel.cubin")
