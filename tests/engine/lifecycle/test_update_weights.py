"""New weights from a folder: no answer is made of some of the old and some of the new, unless that is asked for."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.thread.handle import RequestHandle
from compiled_llm.requests.sampling_params import SamplingParams
from support.parity import assert_account_is_empty
from support.tiny_models import tiny_qwen3

PROMPT = [5, 6, 7, 8] * 9
SHORT, LONG = (SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (12, 100))
WAIT = 60


@pytest.fixture
def model(one_thread: None) -> PreTrainedModel:
    plain = tiny_qwen3(0, eos_token_id=None)
    options: dict[str, Any] = {"mode": "eager", "max_batch_size": 4, "page_size": 4, "progress": False}
    return compiled_llm.wrap(plain, kv_memory="2000 tokens", **options)


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model, max_rows=4) as engine:
        yield engine
    assert_account_is_empty(model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of another seed."""
    folder = tmp_path_factory.mktemp("weights")
    tiny_qwen3(1, eos_token_id=None).save_pretrained(folder)
    return folder


def huggingfaces(seed: int, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    model = tiny_qwen3(seed, eos_token_id=None)
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens)
    return whole[0, len(prompt) :].tolist()


def answer(engine: Engine, prompt: list[int] = PROMPT, params: SamplingParams = SHORT) -> list[int]:
    (output,) = engine.generate(prompt, params)
    return output.outputs[0].token_ids


def tokens(handle: RequestHandle) -> list[int]:
    return handle.result(timeout=WAIT).outputs[0].token_ids


def begun(engine: Engine, prompt: list[int] = PROMPT, params: SamplingParams = LONG) -> RequestHandle:
    """A request that has got some tokens, and runs."""
    handle = engine.submit(prompt, params)
    next(iter(handle))
    return handle


class Updating:
    """An update in a thread of its own; it has begun to wait for requests."""

    def __init__(self, engine: Engine, folder: Path, requests: Any = "wait") -> None:
        self.error: BaseException | None = None
        self._engine = engine
        self._thread = threading.Thread(target=self._update, args=(folder, requests))
        self._thread.start()
        while self._thread.is_alive() and engine._engine_thread.request_table.paused_requests._early is None:
            pass

    def _update(self, folder: Path, requests: Any) -> None:
        try:
            self._engine.update_weights(folder, requests=requests)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._thread.join(WAIT)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


def test_answers_are_those_of_huggingface_with_the_weights_of_the_folder(engine: Engine, folder: Path) -> None:
    assert answer(engine) == huggingfaces(0, PROMPT, 12)
    engine.update_weights(str(folder))
    assert answer(engine) == huggingfaces(1, PROMPT, 12)
    assert engine.stats().cached_tokens == 0  # what was computed with the old ones is gone
    answer(engine)
    assert engine.stats().cached_tokens > 0


def test_generate_and_forward_have_them_too(model: Any, engine: Engine, folder: Path) -> None:
    engine.update_weights(folder)
    ids = torch.tensor([PROMPT])
    expected = tiny_qwen3(1, eos_token_id=None)
    torch.testing.assert_close(model(ids).logits, expected(ids).logits)
    assert model.generate(ids, do_sample=False, max_new_tokens=6)[0, len(PROMPT) :].tolist() == huggingfaces(
        1, PROMPT, 6
    )


def test_who_runs_ends_with_the_old_weights_and_who_comes_begins_with_the_new(engine: Engine, folder: Path) -> None:
    running = [begun(engine, [*PROMPT, number]) for number in range(3)]
    waiting = [engine.submit([*PROMPT, number], LONG, priority=3) for number in range(3, 6)]  # four rows
    updating = Updating(engine, folder)
    late = [engine.submit([*PROMPT, number], SHORT, priority=-3) for number in range(2)]
    cancelled = engine.submit(PROMPT, SHORT)
    cancelled.cancel()
    updating.end()
    for number, handle in enumerate(running + waiting):
        assert tokens(handle) == huggingfaces(0, [*PROMPT, number], 100)
    for number, handle in enumerate(late):
        assert tokens(handle) == huggingfaces(1, [*PROMPT, number], 12)
    assert cancelled.result(timeout=WAIT).outputs[0].finish_reason == "cancelled"


def test_requests_can_be_ended_and_keep_what_they_have(engine: Engine, folder: Path) -> None:
    handles = [begun(engine), engine.submit([3, 4], LONG)]
    engine.update_weights(folder, requests="end")
    found = [handle.result(timeout=WAIT).outputs[0] for handle in handles]
    assert [completion.finish_reason for completion in found] == ["cancelled", "cancelled"]
    assert found[0].token_ids == huggingfaces(0, PROMPT, len(found[0].token_ids))
    assert answer(engine) == huggingfaces(1, PROMPT, 12)


def test_requests_can_go_on_with_the_new_weights(engine: Engine, folder: Path) -> None:
    handle = begun(engine)
    engine.update_weights(folder, requests="keep")
    found, old = tokens(handle), huggingfaces(0, PROMPT, 100)
    assert len(found) == 100
    assert found[0] == old[0]
    assert found != old
    assert answer(engine) == huggingfaces(1, PROMPT, 12)


def test_all_answers_to_one_prompt_have_the_same_weights(engine: Engine, folder: Path) -> None:
    several = SamplingParams(temperature=0.0, n=6, max_tokens=40, ignore_eos=True)  # and there are four rows
    handle = engine.submit(PROMPT, several)
    next(iter(handle.tokens(0)))
    engine.update_weights(folder)
    expected = huggingfaces(0, PROMPT, 40)
    assert [found.token_ids for found in handle.result(timeout=WAIT).outputs] == [expected] * 6


def test_all_engines_of_a_model_wait(model: PreTrainedModel, engine: Engine, folder: Path) -> None:
    with Engine(model, max_rows=2) as other:
        running = begun(other)
        engine.update_weights(folder)
        assert running.done
        assert tokens(running) == huggingfaces(0, PROMPT, 100)
        assert answer(other) == huggingfaces(1, PROMPT, 12)


def test_calls_of_generate_in_progress_end_first(model: Any, engine: Engine, folder: Path) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.begun = threading.Event()

        def put(self, _: Any) -> None:
            self.begun.set()

        def end(self) -> None: ...

    streamer, found = Streamer(), []
    options = {"do_sample": False, "max_new_tokens": 60, "streamer": streamer}
    thread = threading.Thread(target=lambda: found.append(model.generate(torch.tensor([PROMPT]), **options)))
    thread.start()
    assert streamer.begun.wait(WAIT)
    engine.update_weights(folder)
    thread.join(WAIT)
    assert found[0][0, len(PROMPT) :].tolist() == huggingfaces(0, PROMPT, 60)


def test_a_folder_that_is_refused_changes_nothing(engine: Engine, folder: Path, tmp_path: Path) -> None:
    handle = begun(engine)
    with pytest.raises(ValueError, match="there is no folder"):
        engine.update_weights(tmp_path / "none")
    assert not handle.done
    with pytest.raises(ValueError, match="requests='all': give 'wait', 'keep' or 'end'"):
        engine.update_weights(folder, requests="all")  # type: ignore[arg-type]
    assert tokens(handle) == huggingfaces(0, PROMPT, 100)
    assert answer(engine) == huggingfaces(0, PROMPT, 12)
    engine.update_weights(folder)
    assert answer(engine) == huggingfaces(1, PROMPT, 12)


def test_asleep_nothing_is_mixed_either(engine: Engine, folder: Path) -> None:
    handle = begun(engine)
    engine.sleep()
    with pytest.raises(RuntimeError, match=r"the model is asleep, and 1 requests have not ended; wake\(\) it first"):
        engine.update_weights(folder)
    engine.wake()
    assert tokens(handle) == huggingfaces(0, PROMPT, 100)
    engine.sleep()
    engine.update_weights(folder)  # nobody has begun
    engine.wake()
    assert answer(engine) == huggingfaces(1, PROMPT, 12)


def test_asleep_requests_can_be_ended_or_go_on(engine: Engine, folder: Path) -> None:
    handle = begun(engine)
    engine.sleep()
    engine.update_weights(folder, requests="keep")
    engine.wake()
    assert len(tokens(handle)) == 100
    handle = begun(engine)
    engine.sleep()
    engine.update_weights(folder, requests="end")
    assert handle.result(timeout=WAIT).outputs[0].finish_reason == "cancelled"
    engine.wake()
    assert answer(engine) == huggingfaces(1, PROMPT, 12)


def test_one_update_at_a_time(engine: Engine, folder: Path) -> None:
    handle = begun(engine)
    updating = Updating(engine, folder)
    with pytest.raises(RuntimeError, match="another update is in progress"):
        engine.update_weights(folder)
    handle.cancel()
    updating.end()
    engine.update_weights(folder)


def test_an_engine_that_sleeps_or_closes_meanwhile_ends_the_update(engine: Engine, folder: Path) -> None:
    handle = begun(engine)
    updating = Updating(engine, folder)
    late = engine.submit(PROMPT, SHORT)
    engine.sleep()
    with pytest.raises(RuntimeError, match="the model is asleep"):
        updating.end()
    engine.wake()
    assert tokens(late) == huggingfaces(0, PROMPT, 12)
    assert tokens(handle) == huggingfaces(0, PROMPT, 100)
    begun(engine)
    updating = Updating(engine, folder)
    late = engine.submit(PROMPT, SHORT)
    engine.close()
    updating.end()
    assert late.result(timeout=WAIT).outputs[0].finish_reason == "cancelled"


def test_it_is_refused_where_it_would_wait_for_itself(engine: Engine, folder: Path) -> None:
    with engine.paused(), pytest.raises(RuntimeError, match="paused, or running, in this thread"):
        engine.update_weights(folder)
    with Engine(engine._model, max_rows=2) as other:
        other.close()
        with pytest.raises(RuntimeError, match="the engine is closed"):
            other.update_weights(folder)
    assert answer(engine) == huggingfaces(0, PROMPT, 12)


def test_a_deadline_holds_while_a_request_waits_for_the_weights(engine: Engine, folder: Path) -> None:
    handle = begun(engine, PROMPT, SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True))
    updating = Updating(engine, folder)
    late = engine.submit(PROMPT, SHORT, timeout=0.01)
    assert late.result(timeout=WAIT).outputs[0].finish_reason == "timeout"
    assert not handle.done
    handle.cancel()
    updating.end()


@pytest.mark.whole
def test_every_answer_is_of_one_set_of_weights(engine: Engine, folder: Path, tmp_path: Path) -> None:
    """Requests come all the time, of all priorities and lengths, and some are cancelled; weights change to and fro."""
    tiny_qwen3(0, eos_token_id=None).save_pretrained(tmp_path)
    prompts = [[*PROMPT, number] for number in range(4)]
    allowed = [[huggingfaces(seed, prompt, 60) for seed in (0, 1)] for prompt in prompts]
    over, found = threading.Event(), []

    def ask(seed: int) -> None:
        draws = random.Random(seed)
        while not over.is_set():
            number, length = draws.randrange(4), draws.randrange(1, 60)
            params = SamplingParams(temperature=0.0, max_tokens=length, n=draws.choice((1, 1, 3)), ignore_eos=True)
            handle = engine.submit(prompts[number], params, priority=draws.randrange(-2, 3))
            if draws.random() < 0.2:
                handle.cancel()
            found.append((number, [answer.token_ids for answer in handle.result(timeout=WAIT).outputs]))

    askers = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for asker in askers:
        asker.start()
    for step in range(12):
        engine.update_weights((folder, tmp_path)[step % 2])
    over.set()
    for asker in askers:
        asker.join(WAIT)
    seen = set()
    for number, answers in found:
        old, new = ([tokens == whole[: len(tokens)] for tokens in answers] for whole in allowed[number])
        assert all(old) or all(new)
        seen.add(all(new) and not all(old))
    assert seen == {False, True}
    assert len(found) > 24
