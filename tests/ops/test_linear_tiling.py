"""How matmuls of few rows are cut up: tilings fit the device, and are those that were measured to be fast."""

from __future__ import annotations

import itertools

import pytest

from compiled_llm_ops.kernels.linear.chained_tiling import MAX_ROWS, choose_chained_tiling as choose_chained
from compiled_llm_ops.kernels.linear.skinny_tiling import (
    LinearTiling,
    choose_linear_tiling as choose,
    choose_normed_tiling as choose_normed,
)

pytestmark = pytest.mark.core


@pytest.mark.parametrize("processors", [78, 114, 132])
def test_tilings_fit_the_product_and_the_device(processors):
    for m in (*range(1, 67), 96, 112, 128, 176, 192, 256, 500, 512, 513):
        for n in (16, 48, 128, 1000, 1024, 2560, 3072, 4096, 5120, 6144, 12288, 24576, 151936):
            for k in (64, 128, 896, 1024, 2048, 2560, 4000, 4096, 12288, 29568):
                tiling = choose(m, n, k, processors)
                if tiling is None:
                    continue
                assert m <= tiling.rows or tiling.rows == 64
                if tiling.rows <= 2:
                    assert m == tiling.rows
                    assert k % 16 == 0
                    assert tiling.prefetched * tiling.inputs < k + tiling.inputs
                    assert tiling.prefetched * tiling.inputs * tiling.outputs <= 128 * 128, "registers"
                    continue
                assert n % 16 == k % 128 == 0
                assert tiling.rows == 64 or tiling.outputs == 64, "what tensor cores take as their first operand"
                assert tiling.tiles * tiling.outputs * tiling.rows <= 128 * 96, "registers"
                shared = tiling.stages * (tiling.tiles * tiling.outputs + tiling.rows) * tiling.inputs * 2
                assert tiling.stages >= 3
                assert shared < 227 * 1024


def test_tilings_of_measured_products():
    assert choose(8, 4096, 4096) == LinearTiling(16, 64, 1, 256, 5, 0)
    assert choose(8, 1024, 3072) == LinearTiling(16, 64, 1, 256, 5, 0)
    assert choose(32, 24576, 4096) == LinearTiling(32, 64, 3, 128, 4, 0)
    assert choose(32, 6144, 4096) == LinearTiling(32, 64, 1, 256, 4, 0)
    assert choose(64, 24576, 4096) == LinearTiling(64, 64, 3, 128, 3, 0)
    assert choose(64, 4096, 12288) == LinearTiling(64, 64, 1, 128, 7, 0)
    assert choose(33, 2048, 2048) == LinearTiling(64, 32, 1, 256, 4, 0)
    assert choose(64, 1024, 2048) == LinearTiling(64, 16, 1, 256, 5, 0)
    assert choose(2, 4096, 12288) == LinearTiling(16, 64, 1, 256, 5, 0)
    assert choose(2, 2048, 2048) == LinearTiling(2, 2, 1, 1024, 1, 2)
    assert choose(1, 1024, 3072) == LinearTiling(1, 2, 1, 1024, 1, 3)
    assert choose(1, 151936, 1024) == LinearTiling(1, 4, 1, 1024, 1, 1)
    assert choose(8, 512, 4096) is choose(65, 4096, 4096) is None


def test_more_rows_than_a_tile_are_ours_while_each_multiprocessor_has_one_program():
    assert choose(128, 4096, 12288) == choose(512, 1024, 2048) == LinearTiling(64, 64, 1, 128, 7, 0)
    assert choose(256, 4096, 4096) == choose(192, 4096, 1024) == LinearTiling(64, 128, 1, 128, 4, 0)
    assert choose(128, 24576, 4096) is choose(512, 4096, 4096) is None, "two programs each, which cuBLAS does better"
    assert choose(96, 4096, 4096) is choose(130, 4096, 4096) is None, "tiles that are half empty"
    assert choose(128, 1024, 2048) is None, "too few programs"


def test_few_programs_norm_the_row_each_for_itself():
    assert choose_normed(4096, 1024) == choose(1, 4096, 1024)
    assert choose_normed(6144, 4096) == choose(1, 6144, 4096)
    assert choose_normed(6144, 1024) == LinearTiling(1, 8, 1, 1024, 1, 1)  # half as many
    assert choose_normed(24576, 4096) is choose_normed(151936, 1024) is None  # too many
    assert choose_normed(1024, 12288) is None  # the row does not fit beside the weights


@pytest.mark.parametrize("processors", [78, 114, 132])
def test_programs_that_norm_hold_the_whole_row(processors):
    for n in (16, 1000, 1024, 2560, 4096, 6144, 12288, 24576, 151936):
        for k in (64, 896, 1024, 2048, 4096, 12288):
            tiling = choose_normed(n, k, processors)
            if tiling is not None:
                assert tiling.prefetched * tiling.inputs >= k
                assert tiling.prefetched * tiling.inputs * tiling.outputs <= 128 * 128, "registers"
                assert n <= 16 * processors * tiling.outputs


def test_two_products_of_a_small_model_are_one_op():
    expected = {
        2: (8, 8),
        8: (8, 8),
        9: (16, 16),
        16: (16, 16),
        17: (16, 32),
        64: (16, 32),
        65: (32, 64),
        256: (64, 64),
    }
    for m, rows in expected.items():
        for k, next_n, gated in ((2048, 3072, True), (3072, 4096, False)):
            tiling = choose_chained(m, 1024, k, next_n, gated)
            assert tiling is not None
            assert (tiling.first.rows, tiling.second.rows) == rows
            assert (tiling.first.stages == 0) == (m <= 16), "weights are asked for at once"
    assert choose_chained(1, 1024, 2048, 3072, True) is choose_chained(257, 1024, 2048, 3072, True) is None
    assert choose_chained(8, 4096, 4096, 12288, True) is None, "weights that take longest anyway"
    assert choose_chained(8, 2048, 6144, 4096, False) is None, "more weights than a program holds"


@pytest.mark.parametrize("processors", [78, 114, 132])
def test_two_products_fit_their_tilings_and_the_device(processors):
    sizes = (64, 576, 896, 1000, 1024, 1536, 2048, 3072, 4096, 6144, 12288, 151936)
    for m, n, k, next_n, gated in itertools.product((16, 64, 128, MAX_ROWS), sizes, sizes, sizes, (False, True)):
        tiling = choose_chained(m, n, k, next_n, gated, processors)
        if tiling is not None:
            first, second = tiling
            assert n % first.outputs == n % second.inputs == k % first.inputs == 0
            assert next_n % second.outputs == 0, "a tile of both halves"
            assert first.stages > 0 or (m <= first.rows and n <= processors * first.outputs)
            for tile, halves in ((first, 1), (second, 2 if gated else 1)):
                assert tile.stages == 0 or tile.stages >= 3
                assert tile.stages * (halves * tile.outputs + tile.rows) * tile.inputs * 2 < 227 * 1024
