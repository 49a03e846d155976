"""Full garbage collections wait while requests run, and are the process's own matter otherwise."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

import compiled_llm
from compiled_llm import Engine, SamplingParams
from compiled_llm.engine.thread.gc_thresholds import MOST, RAISED_BY, GcThresholds
from support.parity import FEW_PAGES
from support.tiny_models import tiny_qwen3


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield gc.get_threshold()
    gc.set_threshold(*before)


def test_full_collections_come_less_often_while_requests_run(thresholds: tuple[int, int, int]) -> None:
    model = compiled_llm.wrap(tiny_qwen3(eos_token_id=None), mode="eager", **FEW_PAGES)
    raised = (*thresholds[:2], thresholds[2] * RAISED_BY)
    params = SamplingParams(max_tokens=12, temperature=0.0)
    with Engine(model) as engine, Engine(model) as another:
        handles = [each.submit([1, 2, 3], params) for each in (engine, another)]
        seen = {gc.get_threshold() for handle in handles for _ in handle}
        engine.generate([[4, 5]], params)
    assert raised in seen
    assert seen <= {raised, thresholds}
    assert gc.get_threshold() == thresholds


def test_blocks_in_several_threads_raise_them_once(thresholds: tuple[int, int, int]) -> None:
    own, barrier, seen = GcThresholds(), threading.Barrier(4), []

    def block() -> None:
        with own.raised():
            barrier.wait()
            seen.append(gc.get_threshold()[2])
            barrier.wait()

    threads = [threading.Thread(target=block) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [thresholds[2] * RAISED_BY] * 4
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("given", [(0, 0, 0), (700, 10, MOST)], ids=["never", "as seldom as can be"])
def test_what_the_process_has_chosen_stays(given: tuple[int, int, int]) -> None:
    gc.set_threshold(*given)
    with GcThresholds().raised():
        assert gc.get_threshold() == given
    assert gc.get_threshold() == given


def test_thresholds_that_change_meanwhile_are_kept() -> None:
    with GcThresholds().raised():
        gc.set_threshold(5, 6, 7)
    assert gc.get_threshold() == (5, 6, 7)
