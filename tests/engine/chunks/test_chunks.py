"""Policies of chunks: how many tokens of prompts run in a step, and what that does to gaps and first tokens."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from compiled_llm.engine.chunks.policies import policy_of
from compiled_llm.engine.chunks.state import ChunkPolicy
from compiled_llm.engine.chunks.step_times import SIZES, StepTimes
from compiled_llm.engine.chunks.stretched import STRETCH, Stretched
from compiled_llm.engine.chunks.whole import Whole
from compiled_llm.engine.chunks.within import SMALLEST, Within
from support.engine.simulated_chunks import H100_8B, H200_06B, H200_8B, KnownState, Waits, played

# ---- how long steps take


def learned(*steps: tuple[int, int, float]) -> StepTimes:
    """Return the times after steps of rows, tokens of prompts and milliseconds."""
    times = StepTimes()
    for rows, tokens, milliseconds in steps:
        times.learn(rows, tokens, milliseconds / 1000)
    return times


def longer(times: StepTimes, rows: int, tokens: int) -> float:
    found = times.longer(rows)
    assert found is not None
    return 1000 * found[SIZES.index(tokens)]


def test_nothing_is_known_of_a_new_engine() -> None:
    times = StepTimes()
    assert times.decode(3) is None
    assert times.longer(3) is None
    assert not times.knows(3)


def test_what_was_not_timed_lies_between_what_was() -> None:
    times = learned((8, 0, 4.0), (8, 128, 6.0), (7, 256, 7.0), (5, 1024, 14.0))
    assert [longer(times, 8, tokens) for tokens in (64, 128, 192, 256, 512, 1024)] == pytest.approx(
        [1.0, 2.0, 2.5, 3.0, 3 + 7 / 3, 10.0]
    )
    assert longer(times, 8, 1280) == pytest.approx(10 + 256 * 7 / 768), "the next size is tried"
    assert longer(times, 8, 2048) == pytest.approx(20.0), "any other is as slow for each token as the largest"
    assert times.decode(200) == 0.004, "that of the rows that are most like these"


def test_what_prompts_take_alone_counts_until_they_have_run_beside_rows() -> None:
    times = learned((0, 256, 9.0), (4, 0, 4.0))
    assert longer(times, 4, 256) == pytest.approx(9.0)
    times.learn(4, 256, 0.007)
    assert longer(times, 4, 256) == pytest.approx(3.0)
    assert longer(times, 0, 256) == pytest.approx(9.0)


def test_odd_steps_do_not_count_and_a_slower_device_does(seed: int) -> None:
    print("seed", seed)
    draw, times = random.Random(seed), StepTimes()
    for _ in range(40):
        odd = draw.sample(range(5), 2)  # of five steps in a row
        for step in range(5):
            times.learn(6, 0, 0.004 * (30.0 if step in odd else 1.0))
            times.learn(6, 256, 0.007 * (30.0 if step in odd else 1.0))
    assert times.decode(6) == pytest.approx(0.004)
    assert longer(times, 6, 256) == pytest.approx(3.0)
    for _ in range(3):
        times.learn(6, 256, 0.012)
    assert longer(times, 6, 256) == pytest.approx(8.0)


def test_a_size_that_was_odd_once_is_bounded_by_smaller_ones_and_forgotten() -> None:
    times = learned((8, 0, 4.0), (8, 128, 6.0), (8, 512, 500.0))
    assert longer(times, 8, 512) == pytest.approx(8.0), "no token takes longer than those before it"
    times = learned((8, 0, 4.0), *[(8, 512, 500.0)] * 5, (8, 128, 6.0), (8, 64, 5.0))
    assert longer(times, 8, 512) == pytest.approx(496.0)
    for _ in range(500):
        times.learn(8, 128, 0.006)
    assert longer(times, 8, 512) == pytest.approx(8.0)


def test_what_prompts_cost_by_themselves_is_known_once_small_ones_were_timed() -> None:
    assert learned((8, 0, 1.0)).least(8) == 0.0
    assert learned((8, 0, 1.0), (8, 512, 3.2), (8, 640, 3.3)).least(8) == 0.0, "a line through these means nothing"
    times = learned((8, 0, 1.0), (8, 64, 2.3), (8, 96, 2.2), (8, 640, 3.3))
    assert 1000 * times.least(8) == pytest.approx(1.2 - 96 * 1.1 / 544)
    assert learned((8, 0, 1.0), (8, 64, 1.6), (8, 640, 7.0)).least(8) == pytest.approx(0.0, abs=1e-9)
    assert learned((8, 0, 1.0), (8, 64, 1.1), (8, 640, 9.0)).least(8) == 0.0


# ---- one policy after the other


def test_prompts_are_whole_without_a_policy() -> None:
    assert Whole().plan(KnownState(StepTimes(), 200, 10_000, most=4096)) == 4096
    for option, device in ((None, "cuda"), (None, "cpu"), ("auto", "cpu")):
        assert isinstance(policy_of(option, device), Whole)
    assert isinstance(policy_of("auto", "cuda"), Stretched)
    assert isinstance(policy_of(20, "cpu"), Within)


def affine(decoding: int, tokens: int, per_token: float = 1e-5) -> float:
    """Seconds of a step on an imagined device."""
    return (0.002 + 1e-5 * decoding if decoding else 0.0) + (0.001 + per_token * tokens if tokens else 0.0)


def lengths(policy: ChunkPolicy, times: StepTimes, steps: int, rows: int, **speed: float) -> list[float]:
    """Steps of as many tokens as a policy says, beside rows whose own steps are known: how long they took."""
    if rows:
        times.learn(rows, 0, affine(rows, 0))
    took = []
    for _ in range(steps):
        tokens = policy.plan(KnownState(times, rows, 10_000, most=4096))
        took.append(affine(rows, tokens, **speed))
        times.learn(rows, tokens, took[-1])
    return took


@pytest.mark.parametrize("rows", [0, 1, 30, 256])
def test_steps_grow_to_a_limit_and_stay_below(rows: int) -> None:
    took = lengths(Within(20.0), StepTimes(), 40, rows)
    assert max(took) <= 0.020
    assert took[-1] > 0.014, "the next larger size would have been too long"


def test_steps_grow_to_a_limit_that_is_hardly_longer_than_the_smallest() -> None:
    """A chunk of 16 tokens takes as long as one of 128 where the device waits for weights."""
    times = StepTimes()
    for _ in range(20):
        tokens = Within(6.5).plan(KnownState(times, 0, 10_000))
        times.learn(0, tokens, 0.0055 + 1e-5 * max(0, tokens - 128))
    assert tokens in (192, 256)


def test_prompts_go_on_however_short_the_limit() -> None:
    times = learned((64, 0, 5.0), (64, 16, 9.0))
    assert Within(0.001).plan(KnownState(times, 64, 10_000)) == SMALLEST


def test_a_device_that_becomes_slower_is_followed() -> None:
    policy, times = Within(20.0), StepTimes()
    lengths(policy, times, 40, 8)
    assert lengths(policy, times, 120, 8, per_token=8e-5)[-1] <= 0.020


KNOWN = learned((8, 0, 4.0), *((8, size, 4.0 + 1.0 + size / 100) for size in SIZES if size <= 1024))
"""Prompts take a millisecond and one for each 100 tokens: 140 fit into 1.6 times 4 ms."""


def often(policy: Stretched, share: float = 0.12, times: StepTimes = KNOWN) -> None:
    """Let requests begin as often as that, lately."""
    for step in range(10, 5000, 10):
        policy.plan(KnownState(times, 0, step=step, begun=round(share * step)))


@pytest.mark.parametrize("padding", [0, 8])
def test_a_chunk_stretches_steps_by_so_much(padding: int) -> None:
    policy = Stretched()
    often(policy)
    state = KnownState(KNOWN, 8, 200, step=5000, begun=600, padding=padding)
    assert policy.plan(state) == 128 - padding, "what a launch is padded to"
    assert STRETCH == 1.6


def test_chunks_are_whole_if_nobody_follows_or_runs_or_nothing_is_known() -> None:
    policy = Stretched()
    often(policy)
    for state in (
        KnownState(KNOWN, 8, 200, step=5000, begun=600, followed=False),
        KnownState(KNOWN, 0, 200, step=5000, begun=600),
        KnownState(StepTimes(), 8, 200, step=5000, begun=600),
        KnownState(learned((8, 0, 4.0)), 8, 200, step=5000, begun=600),
    ):
        assert policy.plan(state) == 8192


def test_the_rarer_prompts_come_the_longer_a_step_may_be() -> None:
    for share, tokens in ((0.2, 128), (0.12, 128), (0.06, 384), (0.02, 1280)):
        policy = Stretched()
        often(policy, share)
        assert policy.plan(KnownState(KNOWN, 8, 200, step=5000, begun=round(5000 * share))) == tokens


def test_chunks_grow_when_prompts_pile_up() -> None:
    policy = Stretched()
    often(policy)
    assert policy.plan(KnownState(KNOWN, 8, 6000, step=5000, begun=600)) == 2048
    assert policy.plan(KnownState(KNOWN, 8, 1_000_000, step=5000, begun=600, most=4096)) >= 4096


def test_what_a_chunk_costs_by_itself_does_not_outweigh_its_tokens() -> None:
    """Here a chunk costs a millisecond by itself, and 1.6 times a decode step leaves 0.6."""
    times = learned((8, 0, 1.0), *((8, size, 1.0 + 1.0 + size / 100) for size in SIZES if size <= 1024))
    assert times.least(8) == pytest.approx(0.001)
    for stretch, tokens in ((1.6, 64), (2.4, 128), (1.0, 16)):
        policy = Stretched(stretch)
        often(policy, times=times)
        assert policy.plan(KnownState(times, 8, 40, step=5000, begun=600)) == tokens


# ---- loads of a whole engine


def mean(of: Callable[[int], Waits], seeds: range = range(3)) -> Waits:
    found = [of(seed) for seed in seeds]
    chunks = [size for each in found for size in each.chunks]
    return Waits(*np.mean([each[:4] for each in found], axis=0).tolist(), chunks)


LOADS = {
    "8B, H100, 24/s": (H100_8B, 24.0, 0.80, 1.05, 1.15),
    "8B, H200, 24/s": (H200_8B, 24.0, 0.75, 1.05, 1.15),
    "8B, H100, 8/s": (H100_8B, 8.0, 1.05, 0.90, 1.05),
    "8B, H200, 8/s": (H200_8B, 8.0, 1.05, 0.90, 1.05),
    "8B, H200, 2/s": (H200_8B, 2.0, 1.05, 0.90, 1.05),
    "0.6B, H200, 64/s": (H200_06B, 64.0, 0.88, 1.40, 1.60),
    "0.6B, H200, 16/s": (H200_06B, 16.0, 1.05, 1.05, 1.05),
    "0.6B, H200, 4/s": (H200_06B, 4.0, 1.05, 1.05, 1.05),
}
"""A device, requests a second, and gaps' p99 and first tokens' p50 and p99 as multiples of those of whole prompts."""


@pytest.mark.whole
@pytest.mark.parametrize("load", LOADS)
def test_gaps_are_shorter_where_prompts_come_often_and_nothing_is_worse_where_they_are_rare(load: str) -> None:
    """Whole prompts are launched at once, as ever; with chunks, steps that are long enough are launched late."""
    device, rate, gap, p50, p99 = LOADS[load]
    whole = mean(lambda seed: played(Whole(), device, rate, seed))
    auto = mean(lambda seed: played(Stretched(), device, rate, seed, late=1.0))
    print(f"{load}, seeds 0 to 2, first p50, p99, gaps p50, p99 in ms: whole {whole[:4]}, auto {auto[:4]}")
    assert auto.gap_p99 <= gap * whole.gap_p99
    assert auto.first_p50 <= p50 * whole.first_p50
    assert auto.first_p99 <= p99 * whole.first_p99
    assert auto.gap_p50 <= 1.05 * whole.gap_p50


@pytest.mark.whole
def test_prompts_do_not_starve() -> None:
    """Twice as many as chunks of a stretched step could compute."""
    whole, auto = (played(policy, H200_8B, 60.0, 0) for policy in (Whole(), Stretched()))
    assert auto.first_p99 < 2 * whole.first_p99


def test_without_followers_steps_are_those_of_whole_prompts() -> None:
    assert played(Stretched(), H200_8B, 24.0, 1, followed=False) == played(Whole(), H200_8B, 24.0, 1)


@pytest.mark.whole
def test_odd_steps_change_little() -> None:
    """One in 40 takes 20 times as long as usual."""
    odd = random.Random(5)
    times = [20.0 if odd.random() < 1 / 40 else 1.0 for _ in range(20_000)]
    for device, rate in ((H200_8B, 8.0), (H200_06B, 16.0)):
        usual, with_odd = (
            played(Stretched(), device, rate, 2, odd=of) for of in (lambda step: 1.0, lambda step: times[step % 20_000])
        )
        assert np.median(with_odd.chunks) >= 0.6 * np.median(usual.chunks)
