"""How the decode kernel's programs share the keys of their rows: what follows from shapes alone."""

from __future__ import annotations

import pytest

from compiled_llm_ops.kernels.attention.decode_tiling import (
    AttentionTiling,
    choose_attention_tiling as choose,
    choose_listed_tiling as choose_listed,
)

H200 = {"processors": 132, "shared_memory": 228 * 1024}


def test_programs_depend_on_what_never_changes() -> None:
    assert choose(1, 8, 2, 128, 40_960, **H200) == AttentionTiling(1, 16, 3, 1, 128, 5, 4), (
        "one wave, each of large blocks"
    )
    assert choose(1, 8, 2, 128, 600, **H200).programs == 5, "no more than there can be blocks for"
    assert choose(1, 8, 2, 128, 384, **H200).programs == choose(1, 8, 2, 128, 0, **H200).programs == 1
    assert choose(1, 1, 16, 64, 2**20, **H200).programs == 64, "the last to end reads what all others found"


@pytest.mark.parametrize(
    ("rows", "row_tile", "programs"),
    [
        (2, 2, 8),
        (4, 4, 4),
        (8, 8, 4),
        (32, 32, 4),
        (33, 17, 4),
        (64, 32, 4),
        (66, 22, 4),
        (67, 23, 2),
        (300, 30, 2),
        (301, 31, 2),
        (2048, 32, 2),
    ],
)
def test_rows_share_programs_for_the_device_or_a_few_each(rows: int, row_tile: int, programs: int) -> None:
    """In groups: however many rows there are, a program looks at few, and one of them may be long."""
    tiling = choose(rows, 8, 2, 128, 40_960, **H200)
    assert (tiling.row_tile, tiling.programs) == (row_tile, row_tile * programs)
    busy = rows > 4
    assert (tiling.unsplit * tiling.block, tiling.min_share * tiling.block) == ((1024, 1024) if busy else (384, 128))


def test_rows_that_cannot_be_long_get_one_program() -> None:
    tilings = [choose(64, 8, 2, 128, max_keys, **H200) for max_keys in (1024, 1025)]
    assert [(tiling.row_tile, tiling.programs) for tiling in tilings] == [(1, 1), (32, 128)]
    assert choose(2, 8, 2, 128, 600, **H200).programs == 10, "no more than there can be blocks for"


@pytest.mark.parametrize(
    ("rows", "group", "shared_memory", "block", "stages"),
    [(12, 2, 228, 128, 5), (13, 2, 228, 64, 5), (49, 2, 228, 64, 5), (50, 2, 228, 64, 3), (66, 2, 228, 64, 3),
     (67, 2, 228, 64, 5), (1, 17, 228, 64, 3), (12, 2, 99, 64, 5)],
)  # fmt: skip
def test_programs_are_as_large_as_fit(rows: int, group: int, shared_memory: int, block: int, stages: int) -> None:
    tiling = choose(rows, 8, group, 128, 4096, 132, shared_memory * 1024)
    assert (tiling.block, tiling.stages) == (block, stages)
    assert tiling.share_equal is (rows < 50)


def test_lists_of_pages_are_read_by_as_many_small_programs_as_run_at_once() -> None:
    """Each reads 128 keys at least; the newest page is one more block of one of them."""
    found = {rows: choose_listed(rows, 8, 4, 128, 2064, **H200) for rows in (1, 4, 8, 12, 16, 32, 64, 256)}
    assert {(tiling.block, tiling.stages, tiling.warps) for tiling in found.values()} == {(32, 7, 1)}
    assert [tiling.programs / tiling.row_tile for tiling in found.values()] == [16, 16, 8, 5, 4, 2, 1, 1]
    assert (found[8].unsplit, found[8].min_share) == (9, 9)
    assert choose_listed(8, 8, 4, 128, 200, **H200).programs == 1
    assert choose_listed(8, 8, 4, 64, 2064, **H200).block == 32
    assert choose_listed(8, 8, 4, 128, 2064, 132, 164 * 1024).warps > 1, "fewer programs have room"
    for sizes, more in (((8, 8, 4, 256), {}), ((8, 8, 17, 128), {}), ((8, 8, 4, 128), {"number_bytes": 1})):
        assert choose_listed(*sizes, 2064, **H200, **more) == choose(*sizes, 2064, **H200, **more)._replace(stages=3)


def test_float32_has_small_blocks_however_large_programs_could_be() -> None:
    tilings = [choose(8, 8, 2, size, 4096, **H200, number_bytes=4, query_bytes=4) for size in (64, 128, 256, 512)]
    assert [tiling.block for tiling in tilings] == [32, 16, 16, 16]


def test_pages_of_fp8_are_read_by_large_programs_until_rows_fill_the_device() -> None:
    """Their blocks take half of the bytes; few rows are shared by blocks, more by as many as keep the device busy."""
    tilings = {rows: choose(rows, 8, 2, 128, 40_960, **H200, number_bytes=1) for rows in (8, 16, 49, 50, 64, 256)}
    small = [(128, 5, 4)] * 3 + [(64, 5, 2)] * 3
    assert [(tiling.block, tiling.stages, tiling.warps) for tiling in tilings.values()] == small
    assert [tiling.share_equal for tiling in tilings.values()] == [True] * 3 + [False] * 3
    assert [tiling.unsplit for tiling in tilings.values()] == [3, 8, 8, 16, 16, 16]
    assert [tiling.programs / tiling.row_tile for tiling in tilings.values()] == [4, 2, 2, 2, 2, 2]
    assert [tiling.registers for tiling in tilings.values()] == [None, None, 168, None, None, None], (
        "three large ones for each multiprocessor"
    )
    assert choose(48, 8, 2, 64, 40_960, **H200, number_bytes=1).registers is None
    assert choose(48, 8, 2, 128, 40_960, **H200).registers is None
