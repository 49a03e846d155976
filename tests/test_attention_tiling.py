"""How the decode kernel's programs share the keys of their rows: what follows from shapes alone."""

from __future__ import annotations

import pytest

from compiled_llm_ops.attention_tiling import Tiling, choose

H200 = {"processors": 132, "shared_memory": 228 * 1024}


def test_programs_depend_on_what_never_changes() -> None:
    assert choose(1, 8, 2, 128, 40_960, **H200) == Tiling(1, 16, 3, 1, 128, 5, 4), "one wave, each of large blocks"
    assert choose(1, 8, 2, 128, 600, **H200).programs == 5, "no more than there can be blocks for"
    assert choose(1, 8, 2, 128, 384, **H200).programs == choose(1, 8, 2, 128, 0, **H200).programs == 1
    assert choose(1, 1, 16, 64, 2**20, **H200).programs == 64, "the last to end reads what all others found"


@pytest.mark.parametrize(
    ("rows", "together", "budget"), [(2, 2, 16), (8, 8, 16), (16, 16, 16), (24, 24, 24), (32, 32, 32)]
)
def test_programs_for_a_share_each_or_for_the_device(rows: int, together: int, budget: int) -> None:
    tiling = choose(rows, 8, 2, 128, 40_960, **H200)
    assert (tiling.together, tiling.budget, tiling.programs) == (together, budget, rows + budget - 1)


@pytest.mark.parametrize(("rows", "together"), [(33, 17), (64, 32), (300, 30), (301, 31), (2048, 32)])
def test_many_rows_share_programs_in_groups(rows: int, together: int) -> None:
    """However many there are, a program looks at few, and one of them may be long."""
    tiling = choose(rows, 8, 2, 128, 40_960, **H200)
    assert (tiling.together, tiling.budget) == (together, together)
    assert choose(rows, 1, 16, 128, 40_960, **H200).budget == max(together, 132 // -(-rows // together))


def test_rows_that_cannot_be_long_get_one_program() -> None:
    tilings = [choose(64, 8, 2, 128, most_keys, **H200) for most_keys in (192, 193)]
    assert [(tiling.together, tiling.programs) for tiling in tilings] == [(1, 1), (32, 63)]


@pytest.mark.parametrize(
    ("rows", "group", "shared_memory", "block", "stages"),
    [(16, 2, 228, 128, 5), (17, 2, 228, 64, 5), (49, 2, 228, 64, 5), (50, 2, 228, 64, 3), (1, 17, 228, 64, 3),
     (16, 2, 99, 64, 5)],
)  # fmt: skip
def test_programs_are_as_large_as_fit(rows: int, group: int, shared_memory: int, block: int, stages: int) -> None:
    tiling = choose(rows, 8, group, 128, 4096, 132, shared_memory * 1024)
    assert (tiling.block, tiling.stages) == (block, stages)
