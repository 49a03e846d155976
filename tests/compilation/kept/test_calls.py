"""Calls of functions that a step by kept programs takes, beside one by programs that this process has traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch._inductor.codecache import CppPythonBindingsCodeCache

import compiled_llm
from compiled_llm.compat.torch.inductor import inductor_cache
from compiled_llm.compilation.kept import part
from support.compilation.kept_programs import taking
from support.parity import FEW_PAGES, greedy, mixed_prompts
from support.tiny_models import ONE_LAYER, tiny_qwen3

pytestmark = pytest.mark.slow

ROWS = (7, 3)
"""Two, as in `test_cache.py`, whose kernels these are."""


class Ways(NamedTuple):
    """Models alike: the programs of one were traced, those of the other are taken as that one has kept them."""

    traced: Any
    kept: Any


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Ways:
    CppPythonBindingsCodeCache.cache_clear()  # other tests may have loaded the same kernels from caches of their own
    folder = tmp_path_factory.mktemp("kept")
    (folder / "inductor").symlink_to(inductor_cache())
    with part.recording(folder):
        traced = wrapped()
        answer(traced, ROWS, 3)
    with taking(folder):
        kept = wrapped()
        answer(kept, ROWS, 3)
    assert set(traced.compiled.stats().programs.values()) == {"traced"}
    assert set(kept.compiled.stats().programs.values()) == {"kept"}
    return Ways(traced, kept)


def wrapped() -> Any:
    return compiled_llm.wrap(tiny_qwen3(**ONE_LAYER), **FEW_PAGES)


def answer(model: Any, lengths: Sequence[int], tokens: int) -> None:
    greedy(model, mixed_prompts([*lengths], 128, seed=0), tokens)


def calls_of(run: Callable[[], object]) -> int:
    """Count the functions that are called, those of C code too."""
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


def test_a_first_token_takes_no_more_calls_than_a_traced_one(ways: Ways) -> None:
    """Prompts have other lengths each time, as those of different requests."""
    counts = []
    for model in ways:
        for lengths in ((9, 2), (4, 11)):
            answer(model, lengths, 1)
        counts.append(calls_of(lambda model=model: answer(model, (13, 5), 1)))
    traced, kept = counts
    print(f"{traced} calls, and {kept} by a kept program")
    assert kept <= traced


def of_steps(model: Any, change: Callable[[Any], object]) -> int:
    """Count the calls of a decode step after a change."""
    loop = model.compiled.generate_loop()
    for prompt in ([3, 4, 5], [6, 7]):
        loop.admit(prompt, 40)
    for _ in range(6):
        loop.step()
        change(loop)
    counted = calls_of(loop.step)
    loop.close()
    return counted


def forget_a_token(loop: Any) -> None:
    loop.rows[0].rewind(loop.rows[0].exact_length - 1)


@pytest.mark.parametrize("change", [lambda loop: None, forget_a_token], ids=["repeated", "changed"])
def test_a_decode_step_takes_no_more_calls_than_a_traced_one(ways: Ways, change: Callable[[Any], object]) -> None:
    with torch.inference_mode():
        traced, kept = (of_steps(model, change) for model in ways)
    print(f"{traced} calls, and {kept} by a kept program")
    assert kept <= traced
