"""A call of ``generate`` runs in the same shapes each time, whatever is captured by then; an engine pads what is not.

cuBLAS has other kernels for other shapes, so in 16 bits these decide near ties. CudaGraphs are stand-ins.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

import compiled_llm
from compiled_llm.compilation.graphs.table import CudaGraphTable
from compiled_llm.execution.prefill.launches import PrefillLaunches
from support.execution.stand_in_cuda_graphs import finish_all, let_captures_be_late, one_layer, uncompiled
from support.noting import note_calls, note_decode_steps
from support.parity import alone, greedy, mixed_prompts

CALLS = [[9], [5, 9, 30], [70, 3], [4] * 9]


@pytest.fixture(autouse=True)
def cuda_graph(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    let_captures_be_late(monkeypatch, slices=3)
    yield
    finish_all()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The shapes of prefills and the buckets of decode steps that have run."""
    ran = note_decode_steps(monkeypatch)
    note_calls(monkeypatch, PrefillLaunches, "_run_padded", lambda self, launch, *_: ran.append(launch.key))
    return ran


def replays_in(table: CudaGraphTable) -> int:
    return sum(row.replays for row in table)


class EndsAt(StoppingCriteria):
    """Ends row after row."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return self._lengths <= input_ids.shape[1]


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("budget", [None, 2, 5])
def test_a_call_runs_in_the_same_shapes_whatever_is_recorded(
    budget: int | None, ran: list[Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    model, rng = uncompiled(monkeypatch, budget, max_batch_size=16), random.Random(seed)
    known: dict[int, list[Any]] = {}
    for _ in range(3):
        for number, lengths in rng.sample([*enumerate(CALLS)], len(CALLS)):
            ran.clear()
            greedy(model, mixed_prompts(lengths, 128, seed=1), 8)
            shapes = known.setdefault(number, [*ran])
            assert ran == shapes, lengths
            assert shapes[1:] == [model.compiled.model_runner().steps.decode_of(len(lengths)).rows] * 7
    table = model.compiled.cuda_graphs
    print(table)
    assert table.padded == 0
    assert table.misses >= 6, "no call has waited for these"
    assert replays_in(table) > table.misses
    assert (table.evictions > 0) == (budget is not None)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("budget", [2, 5, 7])
def test_a_bounded_call_that_is_repeated_replays_all_its_steps(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CudaGraphs that others could run in make room for it, too."""
    model, inputs = uncompiled(monkeypatch, budget, max_batch_size=16), mixed_prompts([5, 9, 30], 128, seed=1)
    model.compiled.warmup([2])
    greedy(model, inputs, 12)
    before = model.compiled.cuda_graphs
    greedy(model, inputs, 12)
    after = model.compiled.cuda_graphs
    assert (after.captures, after.misses) == (before.captures, before.misses)
    assert replays_in(after) - replays_in(before) == 12


@pytest.mark.whole
def test_which_bucket_rows_run_in_that_are_left_does_not_follow_from_what_is_ready(
    ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = uncompiled(monkeypatch, max_batch_size=16), mixed_prompts([6] * 6, 128, seed=1)
    found = []
    for warm in ([], [1, 4, 8], []):
        if warm:
            model.compiled.warmup(warm)
        ran.clear()
        criteria = StoppingCriteriaList([EndsAt([8, 10, 12, 14, 16, 20])])
        model.generate(**inputs, max_new_tokens=14, do_sample=False, stopping_criteria=criteria, eos_token_id=500)
        found.append([*ran])
    assert found[1] == found[2] == found[0]
    assert [bucket for bucket in dict.fromkeys(found[0]) if isinstance(bucket, int)] == [8, 4, 2]
    assert not [cold for cold in model.compiled.events.cold_starts if "bucket 2" in cold.what], "nobody waited for it"


@pytest.mark.whole
def test_an_engine_pads_what_is_missing(ran: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = uncompiled(monkeypatch, max_batch_size=16)
    prompt = mixed_prompts([9], 128, seed=1)["input_ids"][0].tolist()
    expected = alone(one_layer(), prompt, 12)
    params = compiled_llm.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with compiled_llm.Engine(model, prefix_cache=False, max_num_seqs=16) as engine:
        engine.warmup([2])
        ran.clear()
        for _ in range(3):
            assert [output.token_ids for output in engine.generate([prompt] * 3, params)] == [expected] * 3
    assert [*dict.fromkeys(bucket for bucket in ran if isinstance(bucket, int))] == [16, 4], "in the largest first"
    assert model.compiled.cuda_graphs.padded > 0
