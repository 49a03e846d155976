"""Products with packed weights on a GPU, by each kernel there is: compared with float64, and the same bits twice.

Shapes: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiled_llm_ops import packed_linears
from compiled_llm_ops.packed.linear import multiply_packed
from compiled_llm_ops.packed.rule import MAX_BLOCK, ROUNDED, TWO_ROUNDED, JoinedTile, Library, RoundedTile
from compiled_llm_ops.packed.tilings import (
    PackedLinearTiling,
    RoundedTiling,
    block_inputs,
    can_be_joined,
    can_be_together,
    joined_inputs,
)
from support.gpu import needs_cuda, on_gpu, seeded
from support.ops.packed_weights import (
    ANYWHERE,
    FORMATS,
    IN_ROWS,
    Made,
    arguments_together,
    finite,
    side_by_side,
    tiles_of,
)

pytestmark = [pytest.mark.gpu, needs_cuda]

N, K = 320, 640


def made_on_gpu(name: str, n: int = N, k: int = K) -> Made:
    """A weight without codes of e4m3 that are not numbers, whose zeros that are no integers are of bfloat16."""
    made = finite(name, n, k)
    weight = made.weight
    if weight.zeros is not None and weight.zeros.is_floating_point():
        weight = weight._replace(scales=weight.scales.bfloat16(), zeros=weight.zeros.bfloat16())
    return Made(on_gpu(weight), made.values.cuda())


def check(out: Tensor, rows: Tensor, made: Made) -> None:
    expected = rows.double() @ made.values.T
    near = 0.05 if made.weight.format.may_round else 0.01  # rows may be rounded to e4m3
    assert float((out.double() - expected).norm() / expected.norm()) < near


@seeded
@pytest.mark.parametrize("k", [K, 1024])
@pytest.mark.parametrize("name", FORMATS)
def test_what_the_rule_takes(name: str, k: int, seed: int) -> None:
    """Also where all inputs are one block of the kernel for one row."""
    made = made_on_gpu(name, k=k)
    for m in (1, 2, 7, 16, 17, 33, 64, 100, 200, 300):
        rows = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        out = multiply_packed(rows, made.weight)
        check(out, rows, made)
        assert torch.equal(multiply_packed(rows, made.weight), out)
        for _ in range(3):  # one after the other, each while the previous one ends
            assert torch.equal(multiply_packed(rows + 0, made.weight, overlap=True), out)


tiles_of_formats = pytest.mark.parametrize(
    ("name", "tile"), [(name, tile) for name in FORMATS for tile in tiles_of(name)], ids=str
)


def joinable_on_gpu(name: str) -> Made:
    made = made_on_gpu(name)
    if not can_be_joined(made.weight, torch.bfloat16):
        pytest.skip("not joined")
    return made


def cut_up(made: Made, tile: JoinedTile, splits: int) -> PackedLinearTiling:
    inputs = joined_inputs(made.weight, torch.bfloat16, tile.inputs)
    return PackedLinearTiling(tile.rows, tile.outputs, inputs, tile.stages, splits, tile.warps, joined=True)


@seeded
@tiles_of_formats
def test_codes_joined_in_order(name: str, tile: JoinedTile, seed: int) -> None:
    from compiled_llm_ops.packed.kernels.joined import multiply

    made, rows = joinable_on_gpu(name), torch.randn(tile.rows - 3, K, device="cuda", dtype=torch.bfloat16)
    for splits in (1, 3):
        tiling = cut_up(made, tile, splits)
        out = multiply(rows, made.weight, None, tiling, pdl=False)
        check(out, rows, made)
        assert torch.equal(multiply(rows, made.weight, None, tiling, pdl=True), out)


@seeded
@tiles_of_formats
def test_rows_have_the_bits_that_they_have_in_full_tiles(name: str, tile: JoinedTile, seed: int) -> None:
    from compiled_llm_ops.packed.kernels.joined import multiply

    made, rows = joinable_on_gpu(name), torch.randn(3 * tile.rows, K, device="cuda", dtype=torch.bfloat16)
    tiling = cut_up(made, tile, splits=2)
    full = multiply(rows, made.weight, None, tiling, pdl=False)
    check(full, rows, made)
    for m in (1, tile.rows // 2, tile.rows // 2 + 1, tile.rows - 1, tile.rows, tile.rows + 1, 2 * tile.rows + 3):
        assert torch.equal(multiply(rows[:m], made.weight, None, tiling, pdl=True), full[:m])


@seeded
@pytest.mark.parametrize("tile", [*ROUNDED, TWO_ROUNDED], ids=str)
def test_rows_in_eight_bits(tile: RoundedTile, seed: int) -> None:
    """As cuBLAS multiplies them, with the same bits each time."""
    from compiled_llm_ops.packed.kernels.launching import multiply_as

    made = made_on_gpu("FP8Linear", 1024, 2048)
    for m in (1, tile.rows - 1, tile.rows, tile.rows + 3):
        rows = torch.randn(m, 2048, device="cuda", dtype=torch.bfloat16)
        theirs = multiply_as(Library.ROUNDED, rows, made.weight, None, pdl=False)
        for splits in (1, 3):
            tiling = RoundedTiling(tile.rows, tile.outputs, tile.stages, splits, tile.warps)
            out = multiply_as(tiling, rows, made.weight, None, pdl=False)
            check(out, rows, made)
            assert float((out - theirs).norm() / theirs.norm()) < 0.004
            assert not sum((multiply_as(tiling, rows, made.weight, None, pdl=True) != out).any() for _ in range(50))


CHAINED = ["torchao int8", "torchao float8 by row", "compressed-tensors int4, channel", "torchao int4, tiles"]
"""Formats of which a block's product is added by the next one."""
NF4 = "bitsandbytes NF4"


@seeded
@pytest.mark.parametrize(("tile", "warps"), [((16, 64, 6), 4), ((32, 64, 4), 4), ((64, 128, 4), 4), ((128, 64, 4), 4)])
@pytest.mark.parametrize("name", [*CHAINED, NF4])
def test_products_have_the_same_bits_each_time(name: str, tile: tuple[int, int, int], warps: int, seed: int) -> None:
    """Tensor cores have ended before the next block's numbers take the place of those that they read."""
    from compiled_llm_ops.packed.kernels.joined import multiply

    made = made_on_gpu(name, 1024, 2048)
    weight, (rows_of_tile, outputs, stages) = made.weight, tile
    tiling = PackedLinearTiling(
        rows_of_tile, outputs, block_inputs(weight.format, MAX_BLOCK), stages, 2, warps, joined=True
    )
    rows = torch.randn(4 * rows_of_tile, 2048, device="cuda", dtype=torch.bfloat16)
    out = multiply(rows, weight, None, tiling, pdl=False)
    check(out, rows, made)
    different = sum((multiply(rows, weight, None, tiling, pdl=True) != out).any() for _ in range(300))
    assert int(different) == 0


@seeded
@pytest.mark.parametrize("name", IN_ROWS)
def test_side_by_side_products_have_the_bits_of_those_apart(name: str, seed: int) -> None:
    from compiled_llm_ops.packed.kernels.joined import multiply

    both = [made_on_gpu(name, outputs).weight for outputs in (256, 128)]
    whole = side_by_side(both)
    if not can_be_joined(whole, torch.bfloat16):
        pytest.skip("not joined")
    rows = torch.randn(30, K, device="cuda", dtype=torch.bfloat16)
    tiling = PackedLinearTiling(32, 64, block_inputs(whole.format, MAX_BLOCK), 4, 2, 4, joined=True)
    apart = torch.cat([multiply(rows, own, None, tiling, pdl=False) for own in both], -1)
    assert torch.equal(multiply(rows, whole, None, tiling, pdl=False), apart)


@seeded
@pytest.mark.parametrize("outputs", [(256, 128), (512, 128, 128), (384, 256, 96), (96, 128)], ids=str)
@pytest.mark.parametrize("name", ANYWHERE)
def test_weights_together_have_the_bits_of_those_apart(name: str, outputs: tuple[int, ...], seed: int) -> None:
    """Each program chooses its weight, for each number of rows and tile."""
    from compiled_llm_ops.packed.kernels.joined import multiply, multiply_together

    made = [made_on_gpu(name, count, 1024) for count in outputs]
    weights, block = [own.weight for own in made], block_inputs(made[0].weight.format, MAX_BLOCK)
    whole = made[0]._replace(values=torch.cat([own.values for own in made]))
    for m in (1, 2, 7, 16, 17, 33, 64, 100, 200, 300):
        rows, bias = torch.randn(m, 1024, device="cuda").bfloat16(), torch.randn(sum(outputs), device="cuda").bfloat16()
        out = packed_linears(*arguments_together(rows, weights, bias), overlap=True)
        check(out - bias, rows, whole)
        for _ in range(3):
            assert torch.equal(packed_linears(*arguments_together(rows + 0, weights, bias), overlap=True), out)
    for rows_of_tile in (16, 32, 64):
        cut = PackedLinearTiling(rows_of_tile, 128, block, 4, 2, 4, joined=True)
        if can_be_together(weights, torch.bfloat16):
            rows = torch.randn(rows_of_tile - 3, 1024, device="cuda").bfloat16()
            apart = torch.cat([multiply(rows, own, None, cut, pdl=False) for own in weights], -1)
            for pdl in (False, True, True):
                assert torch.equal(multiply_together(rows, weights, None, cut, pdl=pdl), apart)
