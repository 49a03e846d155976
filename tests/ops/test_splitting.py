"""Whether blocks share the keys of a prefill's rows: by figures measured on a GPU, since what it decides runs there."""

from __future__ import annotations

import pytest
import torch

from compiled_llm import WrapConfig
from compiled_llm.compilation.graphs.step_key import StepKey
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.state.prefill_room import PrefillRoom
from compiled_llm_ops import Geometry
from compiled_llm_ops.flashinfer.splitting import worth_splitting

QWEN3_SMALL = Geometry(16, 8, 128, 16, -1, 0.0, torch.bfloat16, torch.bfloat16)
PROCESSORS = 132

BEFORE = (0, 512, 2048)
MEASURED: dict[tuple[int, int], tuple[tuple[float, float], ...]] = {
    (1, 16): ((9.4, 5.7), (10.4, 15.5), (11.2, 43.3)),
    (1, 64): ((11.0, 6.2), (14.8, 20.7), (16.1, 64.4)),
    (1, 128): ((14.7, 7.9), (18.0, 22.4), (22.7, 66.2)),
    (1, 256): ((23.2, 11.7), (23.8, 26.4), (33.5, 70.1)),
    (1, 512): ((33.8, 19.2), (39.7, 33.7), (57.8, 77.5)),
    (1, 1024): ((72.4, 40.4), (84.1, 64.3), (120.5, 136.4)),
    (1, 2048): ((117.0, 101.3), (139.6, 124.3), (212.1, 196.9)),
    (8, 64): ((10.3, 6.3), (18.6, 21.1), (37.4, 65.6)),
    (8, 128): ((11.5, 6.2), (21.7, 21.1), (40.1, 65.3)),
    (8, 256): ((12.4, 6.3), (27.1, 20.9), (45.9, 65.2)),
    (8, 512): ((14.2, 6.7), (37.6, 21.0), (57.5, 65.7)),
    (8, 1024): ((20.3, 11.1), (63.3, 35.4), (101.4, 107.0)),
    (8, 2048): ((33.6, 22.4), (58.9, 45.8), (133.0, 118.5)),
}
"""How long one attention took on an H200 in microseconds, captured in a graph: with keys shared among blocks, and
without, by rows and new tokens of all; each for the tokens that each row had before."""
CASES = [(*batch, before, *us) for batch, times in MEASURED.items() for before, us in zip(BEFORE, times, strict=True)]


def decided(queries: list[int], lengths: list[int], geometry: Geometry = QWEN3_SMALL) -> bool:
    return worth_splitting(geometry, queries, lengths, PROCESSORS)


@pytest.mark.parametrize(("rows", "tokens", "before", "split", "whole"), CASES)
def test_the_slower_way_is_not_taken(rows: int, tokens: int, before: int, split: float, whole: float) -> None:
    queries = [tokens // rows] * rows
    chosen = split if decided([*queries, 0], [*(before + own for own in queries), 1]) else whole
    assert chosen <= 1.1 * min(split, whole)


def test_one_long_row_among_short_ones_is_shared() -> None:
    assert decided([64] * 8, [30_000, *[64] * 7])
    assert not decided([64] * 8, [64] * 8)


def test_with_more_heads_than_blocks_fill_the_device_nothing_is_shared() -> None:
    assert not worth_splitting(QWEN3_SMALL._replace(kv_heads=64, query_heads=64), [64], [9000], 16)


def test_rows_without_new_tokens_do_not_count() -> None:
    assert not decided([64, 0], [64, 30_000])


def test_a_window_bounds_what_is_gone_over() -> None:
    long = [64], [30_000]
    assert decided(*long)
    assert not decided(*long, QWEN3_SMALL._replace(window_left=20))


def test_on_a_cpu_nothing_is_shared() -> None:
    planner = Planner(
        [QWEN3_SMALL], WrapConfig(), torch.device("cpu"), max_row_tokens=40_960, room=PrefillRoom(64, 2, 0)
    )
    assert planner.schedules == (0,)
    assert planner.schedule_for([64], [30_000]) == 0
    assert not planner.fits(StepKey.prefill(64, 2, schedule=1))
    assert planner.fits(StepKey.prefill(64, 2))
