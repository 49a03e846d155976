"""Batch-invariant attention, matmuls and sums on a GPU: right, and the same bits for a row in any batch."""

from __future__ import annotations

import random

import pytest
import torch

from compiled_llm_ops import invariant_bmm, invariant_linear, invariant_sum
from support.gpu import DTYPES, by_dtype, needs_cuda, seeded
from support.ops.invariant_rows import InvariantRows, Span

pytestmark = [pytest.mark.gpu, needs_cuda]

LENGTHS = [1, 2, 17, 63, 64, 65, 127, 128, 129, 500, 1000, 2049]
OPTIONS = [{}, {"window_left": 5}, {"window_left": 200}, {"logits_soft_cap": 30.0, "window_left": 1024}]
WEIGHTS = [(1024, 1024), (1024, 3072), (4096, 1024), (6144, 4096), (151_936, 1024), (576, 1536), (100, 72)]


@seeded
@by_dtype
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 128, "group": 2},
        {"head_dim": 128, "group": 7},
        {"head_dim": 64, "group": 3},
        {"head_dim": 96, "stored": 128, "group": 1},
        {"head_dim": 256, "group": 4, "kv_heads": 1},
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_in_any_batch(sizes, options, dtype, seed):
    torch.manual_seed(seed)
    rows = InvariantRows(LENGTHS, dtype=dtype, page_size=16, device="cuda", **sizes, **options)
    rows.check_all_ways(seed, batches=20)


@seeded
def test_a_row_decodes_with_the_same_bits_among_up_to_256(seed):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    lengths = [rng.randint(1, 1200) for _ in range(256)]
    rows = InvariantRows(lengths, dtype=torch.bfloat16, head_dim=128, page_size=16, kv_heads=8, device="cuda")
    alone = rows.alone()
    for count in (1, 2, 3, 16, 63, 64, 129, 256):
        spans = [Span(row, lengths[row] - 1, lengths[row]) for row in rng.sample(range(256), count)]
        rows.check(spans, rows.decode(spans), alone)


@seeded
@by_dtype
@pytest.mark.parametrize(("head_dim", "group"), [(128, 2), (128, 8), (64, 4)])
def test_small_tiles_of_attention_have_the_bits_of_large_ones(head_dim, group, dtype, seed):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    lengths = [rng.randint(1, 3000) for _ in range(64)]
    rows = InvariantRows(lengths, dtype=dtype, head_dim=head_dim, group=group, page_size=16, kv_heads=8, device="cuda")
    spans = [Span(row, length - 1, length) for row, length in enumerate(lengths)]
    alone = [rows.decode([span])[0] for span in spans]
    for (out, lse), (own_out, own_lse) in zip(rows.decode(spans), alone, strict=True):
        assert torch.equal(out, own_out)
        assert torch.equal(lse, own_lse)


@seeded
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), WEIGHTS)
def test_rows_are_multiplied_with_the_same_bits_in_any_batch(outputs, inputs, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = torch.randn(1100, inputs, device="cuda", generator=generator).to(dtype)
    weight = (torch.randn(outputs, inputs, device="cuda", generator=generator) * inputs**-0.5).to(dtype)
    bias = torch.randn(outputs, device="cuda", generator=generator).to(dtype)
    rng = random.Random(seed)
    for own in (None, bias):
        whole = invariant_linear(rows, weight, own)
        expected = rows[:64].double() @ weight.double().T + (0 if own is None else own.double())
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(whole[:64].double(), expected, rtol=tolerance, atol=tolerance)
        for count in (1, 1, 2, 3, 16, 63, 64, 65, 127, 256, 1000):
            places = rng.sample(range(1100), count)
            assert torch.equal(invariant_linear(rows[places], weight, own), whole[places]), count


@seeded
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "outputs", "inputs"), [(16, 512, 128), (128, 128, 512), (40, 72, 100)])
def test_rows_of_heads_are_multiplied_with_the_same_bits_in_any_batch(heads, outputs, inputs, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = torch.randn(300, heads, inputs + 8, device="cuda", generator=generator).to(dtype)[..., :inputs]
    matrices = torch.randn(heads, inputs, outputs, device="cuda", generator=generator).to(dtype)
    whole = invariant_bmm(rows.transpose(0, 1), matrices)
    expected = rows.transpose(0, 1).double() @ matrices.double()
    torch.testing.assert_close(whole.double(), expected, rtol=1e-2, atol=1e-3 if dtype == torch.float32 else 0.1)
    rng = random.Random(seed)
    for count in (1, 1, 2, 16, 65, 256):
        places = rng.sample(range(300), count)
        assert torch.equal(invariant_bmm(rows[places].transpose(0, 1), matrices), whole[:, places]), count


@seeded
@by_dtype
@pytest.mark.parametrize("inputs", [64, 1000, 1024, 4096, 12_288])
def test_each_tiling_of_the_rule_has_the_same_bits(inputs, dtype, seed):
    from compiled_llm_ops.kernels.linear.invariant import multiply
    from compiled_llm_ops.kernels.linear.invariant_tiling import TILES

    generator = torch.Generator("cuda").manual_seed(seed)
    rows = torch.randn(1100, inputs, device="cuda", generator=generator).to(dtype)
    weight = torch.randn(1500, inputs, device="cuda", generator=generator).to(dtype)
    expected = multiply(rows, weight, None, TILES[0])
    for tiling in TILES[1:]:
        assert torch.equal(multiply(rows, weight, None, tiling), expected), tiling


@seeded
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
@pytest.mark.parametrize("inputs", [1, 64, 128, 1000, 1024, 4096, 12_288])
def test_rows_are_added_with_the_same_bits_in_any_batch(inputs, dtype, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(1100, inputs, device="cuda", generator=generator).to(dtype)
    whole = invariant_sum(values)
    tolerance = 1e-3 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(whole.double(), values.double().sum(-1), rtol=tolerance, atol=tolerance)
    rng = random.Random(seed)
    for count in (1, 2, 3, 64, 65, 1000):
        places = rng.sample(range(1100), count)
        assert torch.equal(invariant_sum(values[places]), whole[places])
