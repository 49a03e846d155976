"""How many files and calls of ours a step takes, where all that a step needs is known before.

CUDA graphs are those of ``support.execution.stand_in_cuda_graphs``, on a CPU. What a program itself calls is left out,
since a replayed CUDA graph calls nothing, and so are the model and private functions of other libraries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from compiled_llm import Engine, SamplingParams
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.execution.generate_loop import GenerateLoop
from compiled_llm.execution.steps.graph_manager import GraphManager
from compiled_llm.huggingface import generate as loops
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture, uncompiled
from support.noting import note_calls
from support.parity import greedy, mixed_prompts
from support.walk import Walk


class Trip(NamedTuple):
    """The largest numbers of files and of calls that one of several steps took."""

    files: int
    calls: int


def trip(legs: list[list[str]]) -> Trip:
    return Trip(max(len(set(leg)) for leg in legs), max(map(len, legs)))


def mark_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, walk: Walk) -> None:
    original = getattr(owner, name)

    def marking(*args: Any, **kwargs: Any) -> Any:
        walk.mark()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, marking)


def steps_of_generate(model: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> list[list[str]]:
    """Return the legs of a call that prepares nothing, without its first and last ones, which are no whole steps."""
    monkeypatch.setattr(GenerateLoop, "asynchronous", True)
    inputs, walk = mixed_prompts([5, 3], 128, seed), Walk()
    greedy(model, inputs, 40)
    mark_calls(monkeypatch, loops, "append_tokens", walk)
    return walk.of(lambda: greedy(model, inputs, 40))[3:-3]


def quiet(legs: list[list[str]]) -> list[list[str]]:
    """Return the steps in which no row enters a page."""
    left = [leg for leg in legs if "kvcache/row.py" not in leg]
    assert len(left) > len(legs) / 4
    return left


def test_a_captured_step_of_generate_takes_few_calls(monkeypatch, seed):
    let_a_cpu_capture(monkeypatch)
    found = trip(quiet(steps_of_generate(uncompiled(monkeypatch), monkeypatch, seed)))
    print(f"captured generate: {found}")
    assert found.files <= 8
    assert found.calls <= 22


def test_a_captured_step_of_an_engine_takes_few_calls(monkeypatch):
    let_a_cpu_capture(monkeypatch)
    monkeypatch.setattr(Loop, "asynchronous", True)
    model, params, walk = uncompiled(monkeypatch), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), Walk()
    with Engine(model, watch_model=False) as engine:
        engine.generate([[3, 4, 5], [6, 7, 8, 9]], params)
        mark_calls(monkeypatch, EngineThread, "_step", walk)
        legs = walk.of(lambda: engine.generate([[3, 4, 5], [6, 7, 8, 9]], params))
    # Without steps that are made anew, and those that look at each request, as it gets a place in a log.
    longer, steps = {"execution/model_runner.py", "engine/steps/request.py"}, quiet(legs[3:-3])
    repeated = [leg for leg in steps if longer.isdisjoint(leg)]
    assert len(repeated) > len(steps) / 2
    found = trip(repeated)
    print(f"captured engine: {found}")
    assert found.files <= 13
    assert found.calls <= 36


def test_an_uncompiled_step_takes_few_calls_beside_the_program(monkeypatch, seed):
    legs = quiet(steps_of_generate(uncompiled(monkeypatch), monkeypatch, seed))
    bound = [leg for leg in legs if "compilation/program_list.py" in leg]  # once by its first run, once by the next
    assert len(bound) <= 1
    found = trip([leg for leg in legs if leg not in bound])
    print(f"eager generate: {found}")
    assert found.files <= 8
    assert found.calls <= 26


def test_the_first_decode_step_after_a_prefill_takes_few_calls(monkeypatch, seed):
    """Of one row; all that it runs is captured. Eight objects take part, beside those that keep state."""
    let_a_cpu_capture(monkeypatch)
    monkeypatch.setattr(GenerateLoop, "asynchronous", True)
    model, inputs, walk = uncompiled(monkeypatch), mixed_prompts([5], 128, seed), Walk()
    for _ in range(3):
        greedy(model, inputs, 40)
    mark_calls(monkeypatch, GenerateLoop, "step", walk)
    changed = walk.of(lambda: greedy(model, inputs, 40))[2]
    found = trip([changed])
    print(f"changed step: {found}")
    assert found.files <= 17
    assert found.calls <= 90
    objects = {name for name in walk.objects[2] if not name.startswith("_")}
    print(f"its objects: {sorted(objects)}")
    assert len(objects) <= 8


@pytest.mark.parametrize(
    ("more", "checks"),
    [({}, 1), ({"num_beams": 2}, 20), ({"stopping_criteria": [lambda ids, scores: False]}, 20)],
    ids=["plain", "beams", "criterion"],
)
def test_a_call_checks_the_model_as_often_as_the_code_of_its_user_has_run(monkeypatch, seed, more, checks):
    """Beams make each step anew, and a check belongs to that."""
    let_a_cpu_capture(monkeypatch)
    model, inputs = uncompiled(monkeypatch), mixed_prompts([5, 3], 128, seed)
    greedy(model, inputs, 20, **more)
    noted = note_calls(monkeypatch, GraphManager, "check_model", lambda *_: None)
    greedy(model, inputs, 20, **more)
    assert len(noted) == checks
