"""New weights from a folder: no answer is made of some of the old and some of the new, unless that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from compiled_llm.engine.engine import Engine
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.tiny_engines import PATIENCE, greedy, huggingfaces, tiny
from support.in_threads import start
from support.parity import alone, assert_account_is_empty

PROMPT = [5, 6, 7, 8] * 9
SHORT, LONG = greedy(12), greedy(100)


@pytest.fixture
def engine(model: PreTrainedModel, one_thread: None) -> Iterator[Engine]:
    with Engine(model, max_num_seqs=4) as engine:
        yield engine
    assert_account_is_empty(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of another seed."""
    folder = tmp_path_factory.mktemp("weights")
    tiny(1).save_pretrained(folder)
    return folder


def answer(engine: Engine, prompt: list[int] = PROMPT, params: SamplingParams = SHORT) -> list[int]:
    (output,) = engine.generate(prompt, params)
    return output.outputs[0].token_ids


def tokens(handle: RequestHandle) -> list[int]:
    return handle.result(PATIENCE).outputs[0].token_ids


def begun(engine: Engine, prompt: list[int] = PROMPT, params: SamplingParams = LONG) -> RequestHandle:
    """A request that has got some tokens, and runs."""
    handle = engine.submit(prompt, params)
    next(iter(handle))
    return handle


def started(engine: Engine, folder: Path) -> Future[None]:
    """An update in a thread of its own; it has begun to wait for requests."""
    updating = start(lambda: engine.update_weights(folder))
    while not updating.done() and engine._engine_thread.request_table.paused_requests._early is None:
        pass
    return updating


def test_answers_are_those_of_huggingface_with_the_weights_of_the_folder(model, engine, folder):
    assert answer(engine) == huggingfaces(PROMPT, 12)
    engine.update_weights(str(folder))
    assert answer(engine) == huggingfaces(PROMPT, 12, 1)
    assert engine.stats().cached_tokens == 0  # what was computed with the old ones is gone
    answer(engine)
    assert engine.stats().cached_tokens > 0
    torch.testing.assert_close(model(torch.tensor([PROMPT])).logits, tiny(1)(torch.tensor([PROMPT])).logits)
    assert alone(model, PROMPT, 6) == huggingfaces(PROMPT, 6, 1)


def test_requests_end_with_the_old_weights_and_later_ones_begin_with_the_new(engine, folder):
    running = [begun(engine, [*PROMPT, number]) for number in range(3)]
    waiting = [engine.submit([*PROMPT, number], LONG, priority=3) for number in range(3, 6)]  # four rows
    updating = started(engine, folder)
    late = [engine.submit([*PROMPT, number], SHORT, priority=-3) for number in range(2)]
    cancelled = engine.submit(PROMPT, SHORT)
    cancelled.cancel()
    updating.result(PATIENCE)
    for number, handle in enumerate(running + waiting):
        assert tokens(handle) == huggingfaces([*PROMPT, number], 100)
    for number, handle in enumerate(late):
        assert tokens(handle) == huggingfaces([*PROMPT, number], 12, 1)
    assert cancelled.result(PATIENCE).outputs[0].finish_reason == "cancelled"


def test_requests_can_be_ended_and_keep_what_they_have(engine, folder):
    handles = [begun(engine), engine.submit([3, 4], LONG)]
    engine.update_weights(folder, requests="end")
    found = [handle.result(PATIENCE).outputs[0] for handle in handles]
    assert [completion.finish_reason for completion in found] == ["cancelled", "cancelled"]
    assert found[0].token_ids == huggingfaces(PROMPT, len(found[0].token_ids))
    assert answer(engine) == huggingfaces(PROMPT, 12, 1)


def test_requests_can_go_on_with_the_new_weights(engine, folder):
    handle = begun(engine)
    engine.update_weights(folder, requests="keep")
    found, old = tokens(handle), huggingfaces(PROMPT, 100)
    assert len(found) == 100
    assert found[0] == old[0]
    assert found != old
    assert answer(engine) == huggingfaces(PROMPT, 12, 1)


def test_all_answers_to_one_prompt_have_the_same_weights(engine, folder):
    several = greedy(40, n=6)  # and there are four rows
    handle = engine.submit(PROMPT, several)
    next(iter(handle.tokens(0)))
    engine.update_weights(folder)
    expected = huggingfaces(PROMPT, 40)
    assert [found.token_ids for found in handle.result(PATIENCE).outputs] == [expected] * 6


def test_all_engines_of_a_model_wait(model, engine, folder):
    with Engine(model, max_num_seqs=2) as other:
        running = begun(other)
        engine.update_weights(folder)
        assert running.done
        assert tokens(running) == huggingfaces(PROMPT, 100)
        assert answer(other) == huggingfaces(PROMPT, 12, 1)


def test_a_folder_that_is_refused_changes_nothing(engine, folder, tmp_path):
    handle = begun(engine)
    with pytest.raises(ValueError, match="there is no folder"):
        engine.update_weights(tmp_path / "none")
    assert not handle.done
    with pytest.raises(ValueError, match="requests='all': give 'wait', 'keep' or 'end'"):
        engine.update_weights(folder, requests="all")  # type: ignore[arg-type]
    assert tokens(handle) == huggingfaces(PROMPT, 100)
    assert answer(engine) == huggingfaces(PROMPT, 12)
    engine.update_weights(folder)
    assert answer(engine) == huggingfaces(PROMPT, 12, 1)


def test_asleep_nothing_is_mixed_either_unless_requests_end_or_go_on(engine, folder):
    handle = begun(engine)
    engine.sleep()
    with pytest.raises(RuntimeError, match=r"the model is asleep, and 1 requests have not ended; wake\(\) it first"):
        engine.update_weights(folder)
    engine.wake()
    assert tokens(handle) == huggingfaces(PROMPT, 100)
    engine.sleep()
    engine.update_weights(folder)  # no request has begun
    engine.wake()
    assert answer(engine) == huggingfaces(PROMPT, 12, 1)
    for requests, reason in (("keep", "length"), ("end", "cancelled")):
        handle = begun(engine)
        engine.sleep()
        engine.update_weights(folder, requests=requests)  # type: ignore[arg-type]
        assert handle.done == (requests == "end")
        engine.wake()
        output = handle.result(PATIENCE)
        assert (output.finish_reason, len(output.token_ids) == 100) == (reason, requests == "keep")
    assert answer(engine) == huggingfaces(PROMPT, 12, 1)


def test_one_update_at_a_time(engine, folder):
    handle = begun(engine)
    updating = started(engine, folder)
    with pytest.raises(RuntimeError, match="another update is in progress"):
        engine.update_weights(folder)
    handle.cancel()
    updating.result(PATIENCE)
    engine.update_weights(folder)


def test_an_engine_that_sleeps_or_closes_meanwhile_ends_the_update(engine, folder):
    handle = begun(engine)
    updating = started(engine, folder)
    late = engine.submit(PROMPT, SHORT)
    engine.sleep()
    with pytest.raises(RuntimeError, match="the model is asleep"):
        updating.result(PATIENCE)
    engine.wake()
    assert tokens(late) == huggingfaces(PROMPT, 12)
    assert tokens(handle) == huggingfaces(PROMPT, 100)
    begun(engine)
    updating = started(engine, folder)
    late = engine.submit(PROMPT, SHORT)
    engine.close()
    updating.result(PATIENCE)
    assert late.result(PATIENCE).outputs[0].finish_reason == "cancelled"


def test_a_deadline_holds_while_a_request_waits_for_the_weights(engine, folder):
    handle = begun(engine, PROMPT, greedy(900))
    updating = started(engine, folder)
    late = engine.submit(PROMPT, SHORT, timeout=0.01)
    assert late.result(PATIENCE).outputs[0].finish_reason == "timeout"
    assert not handle.done
    handle.cancel()
    updating.result(PATIENCE)
