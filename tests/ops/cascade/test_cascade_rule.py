"""The rule that reads shared pages once against times that were measured on an H100."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from compiled_llm_ops import SharedRun
from compiled_llm_ops.attention.cascade.rule import CascadeLayer, cascade_saves

pytestmark = pytest.mark.core

SMALL, LARGE = CascadeLayer(16, 8, 128, 2, windowed=False), CascadeLayer(32, 8, 128, 2, windowed=False)

# Groups, rows of each, shared keys, microseconds of decode and of cascade attention.
# Rows of 512 keys of their own, 256 where there are 256 rows, 16 query heads:
OF_LONG_ROWS = [
    (1, 2, 256, 7.3, 10.1), (1, 16, 256, 23.7, 22.6), (1, 64, 256, 60.6, 58.8), (1, 256, 256, 115.4, 106.3),
    (16, 2, 256, 39.2, 42.5), (16, 4, 256, 63.1, 63.3), (16, 16, 256, 122.9, 110.4), (64, 4, 256, 128.8, 129.2),
    (1, 2, 1024, 9.5, 14.6), (1, 4, 1024, 11.9, 16.4), (1, 8, 1024, 16.3, 16.6), (1, 16, 1024, 28.6, 24.0),
    (1, 64, 1024, 87.0, 61.8), (1, 256, 1024, 208.9, 112.2), (16, 4, 1024, 91.1, 82.8), (32, 2, 1024, 100.8, 103.9),
    (64, 4, 1024, 278.2, 194.3), (1, 2, 4096, 14.6, 22.0), (1, 4, 4096, 22.0, 22.9), (1, 8, 4096, 36.9, 27.5),
    (1, 64, 4096, 192.2, 66.9), (1, 256, 4096, 607.6, 131.5), (4, 4, 4096, 73.7, 43.2), (16, 2, 4096, 140.8, 127.1),
    (32, 2, 4096, 240.9, 248.0), (16, 16, 4096, 1022.9, 190.1), (64, 4, 4096, 1041.7, 487.5),
]  # fmt: skip
# Rows of 32 keys of their own, 32 query heads:
OF_SHORT_ROWS = [
    (1, 2, 128, 6.7, 8.1), (1, 16, 128, 8.1, 8.9), (1, 64, 128, 13.1, 14.3), (1, 256, 128, 49.1, 48.7),
    (16, 16, 128, 49.6, 49.5), (64, 4, 128, 50.5, 64.3), (1, 2, 512, 8.1, 9.0), (1, 16, 512, 16.9, 9.7),
    (1, 64, 512, 26.6, 16.6), (1, 256, 512, 104.1, 54.3), (32, 2, 512, 34.4, 42.4), (16, 16, 512, 104.9, 57.5),
    (64, 4, 512, 106.3, 94.8),
]  # fmt: skip


def runs_of(groups: int, rows: int, keys: int, page_size: int = 16) -> list[SharedRun]:
    return [SharedRun(tuple(range(at * rows, (at + 1) * rows)), 0, keys // page_size) for at in range(groups)]


def saves(layer: CascadeLayer, groups: int, rows: int, keys: int) -> float:
    return cascade_saves(runs_of(groups, rows, keys), groups * rows, 16, layer)


@pytest.mark.parametrize(
    ("layer", "measured", "given_away"),
    [(SMALL, OF_LONG_ROWS, 1.2), (LARGE, OF_SHORT_ROWS, 1.8)],
    ids=["long", "short"],
)
def test_what_it_chooses_was_never_slower(
    layer: CascadeLayer, measured: Sequence[tuple[int, int, int, float, float]], given_away: float
) -> None:
    chosen = [(decode, cascade) for *sizes, decode, cascade in measured if saves(layer, *sizes) > 0]
    assert all(cascade < decode for decode, cascade in chosen)
    missed = [decode / cascade for *sizes, decode, cascade in measured if saves(layer, *sizes) <= 0]
    assert max(missed) < given_away, "rows are not left alone where it pays much"


@pytest.mark.parametrize("sizes", [(1, 64, 8192), (16, 16, 4096), (1, 256, 1024)], ids=str)
def test_many_rows_of_a_long_beginning_read_it_once(sizes: tuple[int, int, int]) -> None:
    assert saves(SMALL, *sizes) > 20
    assert saves(LARGE, *sizes) > 20


def test_windows_have_costs_alone() -> None:
    assert saves(SMALL._replace(windowed=True), 1, 64, 8192) == saves(SMALL, 0, 64, 8192) - 64 * 16 * 2e-3 < 0


def test_half_the_bytes_save_half_the_time() -> None:
    whole, half, costs = (
        cascade_saves(runs_of(1, 64, keys), 64, 16, layer)
        for keys, layer in ((8192, SMALL), (8192, SMALL._replace(itemsize=1)), (0, SMALL))
    )
    assert half - costs == pytest.approx((whole - costs) / 2)
