"""Two engines of one model have one prefix cache: a change of weights that one is told of holds for both."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from compiled_llm.engine import model_check
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.engine.thread.engine_thread import EngineThread
from compiled_llm.model.version.model_version import ModelVersion
from support.engine.tiny_engines import PATIENCE, greedy, huggingfaces, tiny, wrapped
from support.in_threads import start
from support.noting import note_calls
from support.parity import alone

PROMPT = list(range(3, 23))
GREEDY = greedy(12)


def change(model: PreTrainedModel) -> PreTrainedModel:
    """In a way that leaves no trace."""
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(-1)
    return model


@pytest.fixture
def model() -> PreTrainedModel:
    return wrapped(400)


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """One that keeps pages, and has kept some."""
    assert answer(engine) == huggingfaces(PROMPT, 12)
    return engine


def answer(engine: Engine) -> list[int]:
    return engine.generate([PROMPT], GREEDY)[0].token_ids


def paused(engine: Engine, folder: Path) -> None:
    with engine.paused():
        change(engine._model)


def reset(engine: Engine, folder: Path) -> None:
    change(engine._model)
    engine.reset_prefix_cache()


def updated(engine: Engine, folder: Path) -> None:
    change(tiny()).save_pretrained(folder)
    engine.update_weights(folder)


@pytest.mark.drawn(most=4)
@pytest.mark.parametrize("says", [paused, reset, updated])
@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_either_engine_says_it_for_both(says, busy, prefix_cache, model, engine, tmp_path):
    with Engine(model, prefix_cache=prefix_cache) as other:
        for each in (other, engine) if busy else (engine,):
            answer(each)
        says(other, tmp_path)
        assert answer(engine) == alone(change(tiny()), PROMPT, 12)
        cached = engine.stats().cached_tokens
        assert answer(engine) == alone(change(tiny()), PROMPT, 12)
        assert engine.stats().cached_tokens > cached  # what it has computed since is kept


def test_an_update_that_fails_keeps_no_pages(model, engine, tmp_path, monkeypatch):
    """Some weights are new by then."""

    def fails(self: object) -> None:
        change(model)
        raise RuntimeError("the device has failed")

    monkeypatch.setattr("compiled_llm.model.weights.new_weights.NewWeights.write", fails)
    with pytest.raises(RuntimeError, match="the device has failed"):
        updated(engine, tmp_path)
    assert answer(engine) == alone(change(tiny()), PROMPT, 12)


@pytest.mark.parametrize("watched", [True, False])
def test_an_engine_that_runs_looks_at_the_model_in_its_next_step(watched, model, engine, monkeypatch):
    """A captured step would go on with tensors that were replaced, and what it computes would be kept."""
    monkeypatch.setattr(model_check, "_SECONDS", 1000)
    monkeypatch.setattr(EngineThread, "start_thread", lambda self: None)
    looked, looks, step = list[bool](), list[object](), Loop.step

    def counted(loop: Loop, look: bool = False) -> Any:
        looks.clear()
        changed = step(loop, look)
        looked.append(bool(looks))
        if len(looked) == 5:
            engine._engine_thread.model_may_have_changed(weights_stay=False)
        return changed

    note_calls(monkeypatch, ModelVersion, "begin_check", lambda version: looks.append(version))
    monkeypatch.setattr(Loop, "step", counted)
    with Engine(model, watch_model=watched) as runs:
        handle = runs.submit(PROMPT, GREEDY)
        runs._engine_thread.run(lambda: handle.done)
        assert looked[2:8] == [False, False, False, True, False, False]


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("changes", ["sleep", "update_weights"])
@pytest.mark.parametrize("first", [True, False])
def test_a_thread_that_has_paused_one_engine_may_use_the_other_while_a_third_one_stops_both(
    first, changes, model, engine, tmp_path
):
    """Whichever engine is paused: the other would be kept by the thread that waits for this one."""
    model.save_pretrained(tmp_path)
    with Engine(model) as another:
        mine, other = (engine, another) if first else (another, engine)
        with mine.paused():
            stopping = start(lambda: mine.sleep() if changes == "sleep" else mine.update_weights(tmp_path))
            time.sleep(0.1)
            assert start(lambda: answer(other)).result(PATIENCE) == huggingfaces(PROMPT, 12)
        stopping.result(PATIENCE)
        if engine.asleep:
            engine.wake()
