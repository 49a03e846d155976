"""An engine that sleeps gives device memory back, and goes on after it as if nothing had been."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.engine.engine import Engine
from compiled_llm.engine.steps.loop import Loop
from compiled_llm.execution.lifecycle import runner_lifecycle
from compiled_llm.execution.lifecycle.runner_lifecycle import ModelRunnerLifecycle
from compiled_llm.kvcache.releasable_memory import ReleasableMemory
from compiled_llm.requests.handle import RequestHandle
from compiled_llm.requests.sampling_params import SamplingParams
from support.engine.tiny_engines import PATIENCE, greedy, tiny, wrapped
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture
from support.in_threads import start
from support.parity import alone, assert_account_is_empty

PROMPTS = [[5, 6, 7, 8] * 9, [5, 6, 7, 8] * 5 + [9, 10], [3, 4]]
PARAMS = [
    greedy(24),
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3, seed=3, n=2, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True),
]


PAGES: dict[str, Any] = {"page_size": 16, "max_batch_size": 8}


@pytest.fixture
def model(one_thread) -> PreTrainedModel:
    return wrapped(**PAGES)


@pytest.fixture
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model, max_num_seqs=8) as engine:
        yield engine


def answers(engine: Engine) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in engine.generate(PROMPTS, PARAMS)]


def begun(engine: Engine) -> list[RequestHandle]:
    """Requests in the midst of their answers."""
    handles = [engine.submit(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    reached = threading.Event()
    handles[1].when_changed(lambda: len(handles[1].requests[1].tokens) >= 3 and reached.set())
    assert reached.wait(PATIENCE)
    return handles


def results(handles: list[RequestHandle]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in handle.result(PATIENCE).outputs] for handle in handles]


def device_objects(model: PreTrainedModel) -> dict[str, weakref.ref[Any]]:
    model_runner = model.compiled.model_runner()
    state, planner = model_runner.state, model_runner._planner
    named = {
        "model runner": model_runner,
        "pages": state.pages[0],
        "arena": state.arena,
        "slots": state.slots.tables.counts,
        "workspace": planner._workspace.buffer,
        "cuda_graphs": model_runner.graph_manager.cuda_graphs,
    }
    return {name: weakref.ref(found) for name, found in named.items()}


def alive(objects: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, reference in objects.items() if reference() is not None]


@pytest.fixture
def weights_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU too, to other memory."""
    monkeypatch.setattr(runner_lifecycle, "is_host", lambda device: False)


def places(model: PreTrainedModel) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


# ---- requests


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("late", [False, True])
def test_requests_that_are_parked_get_the_tokens_that_they_would_have_got(monkeypatch, model, engine, late):
    monkeypatch.setattr(Loop, "asynchronous", late)
    expected = answers(engine)
    for _ in range(2):
        handles = begun(engine)
        assert engine.sleep() > 0
        so_far = [list(request.tokens) for handle in handles for request in handle.requests]
        assert all(len(tokens) < 24 for tokens in so_far)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.pages) == (0, 4, None)
        assert "asleep, 4 waiting" in repr(engine)
        engine.wake()
        assert results(handles) == expected
    stats = engine.stats()
    assert (stats.finished, stats.new_tokens, stats.preemptions) == (12, 12 * 24, 0)
    assert answers(engine) == expected
    engine.close()
    assert_account_is_empty(model)


def test_callers_who_wait_for_answers_wait_through_it(engine):
    expected, before = answers(engine), engine.stats().new_tokens
    caller = start(lambda: answers(engine))
    while engine.stats().new_tokens == before:
        time.sleep(0.001)
    engine.sleep()
    assert not caller.done()
    engine.wake()
    assert caller.result(PATIENCE) == expected


def test_requests_that_are_ended_keep_their_tokens(engine):
    expected = answers(engine)
    handles = begun(engine)
    engine.sleep(requests="end")
    outputs = [handle.result(PATIENCE) for handle in handles]
    assert {answer.finish_reason for output in outputs for answer in output.outputs} == {"cancelled"}
    for output, full in zip(outputs, expected, strict=True):
        for answer, whole in zip(output.outputs, full, strict=True):
            assert answer.token_ids == whole[: len(answer.token_ids)]
    assert engine.stats().waiting == 0
    engine.wake()
    assert answers(engine) == expected


def test_parked_requests_can_be_cancelled_and_end_at_their_deadlines(engine):
    handles = begun(engine)
    with engine.paused():
        late = engine.submit(PROMPTS[0], PARAMS[0], timeout=0.01)
    engine.sleep()
    handles[0].cancel()
    assert handles[0].result(PATIENCE).finish_reason == "cancelled"
    engine.wake()
    assert results(handles[1:])
    assert late.result(PATIENCE).finish_reason in ("timeout", "length")


def test_all_engines_of_a_model_sleep_and_wake_together(model, engine):
    expected = answers(engine)
    with Engine(model, max_num_seqs=4) as other:
        handles = begun(other)
        engine.sleep()
        assert other.asleep
        with pytest.raises(RuntimeError, match=r"asleep.* wake\(\)"):
            other.submit([5])
        other.wake()
        assert not engine.asleep
        assert results(handles) == expected


# ---- memory


@pytest.mark.whole
@pytest.mark.parametrize("how", ["eager", "captured", pytest.param("compile", marks=pytest.mark.whole)])
def test_nothing_of_the_model_runner_is_left_and_all_of_it_is_made_again(monkeypatch, one_thread, how):
    captures = how == "captured"
    if captures:
        let_a_cpu_capture(monkeypatch)
    model = wrapped(mode="compile" if how == "compile" else "eager", **PAGES)
    with Engine(model, max_num_seqs=8) as engine:
        if captures:
            engine.warmup([1, 2, 4, 8])  # all that requests may run in, however they meet
        expected = answers(engine)
        memory, objects = engine.describe().memory, device_objects(model)
        graphs, before = model.compiled.graphs, model.compiled.stats()
        assert (before.cuda_graphs > 1, before.prefill_cuda_graphs > 1) == (captures, captures)
        handles = begun(engine)
        given_back = engine.sleep(graphs=True)
        assert alive(objects) == []
        assert captures or given_back == sum(memory.values()) - memory["weights"]
        assert "asleep" in repr(model.compiled)
        assert model.compiled.stats().memory == {}
        engine.wake()
        awake = model.compiled.stats()
        assert (awake.cuda_graphs, awake.prefill_cuda_graphs) == (before.cuda_graphs, before.prefill_cuda_graphs)
        assert engine.stats().cuda_graphs == awake.cuda_graphs + awake.prefill_cuda_graphs
        assert not captures or awake.buckets == before.buckets
        assert results(handles) == answers(engine) == expected
        assert (model.compiled.graphs, model.compiled.stats().recompiles) == (graphs, 0)
        assert model.compiled.stats().cuda_graphs == before.cuda_graphs
        assert model.compiled.recaptures() == (0, [])
        assert set(before.buckets) <= set(model.compiled.stats().buckets)
        assert captures or engine.describe().memory == memory


def addresses(model: PreTrainedModel) -> list[int]:
    state = model.compiled.model_runner().state
    return [memory.data_ptr() for memory in (*state.pages, state.slots.tables.counts)]


def test_pages_come_back_to_the_same_addresses_and_no_cuda_graph_is_captured_again(monkeypatch, one_thread):
    let_a_cpu_capture(monkeypatch)
    model = wrapped(mode="eager", **PAGES)
    with Engine(model, max_num_seqs=8) as engine:
        engine.warmup([1, 2, 4, 8])
        expected = answers(engine)
        memory, objects, at = engine.describe().memory, device_objects(model), addresses(model)
        table = model.compiled.cuda_graphs.as_dicts()
        for _ in range(2):
            handles = begun(engine)
            assert engine.sleep() == memory["pages"]
            assert alive(objects) == list(objects)
            assert model.compiled.stats().memory == {}
            assert model.compiled.stats().pages is None
            engine.wake()
            assert addresses(model) == at
            assert results(handles) == answers(engine) == expected
        again = model.compiled.cuda_graphs.as_dicts()
        assert [(one["rows"], one["captures"]) for one in again] == [(one["rows"], one["captures"]) for one in table]
        assert (model.compiled.stats().recompiles, model.compiled.recaptures()) == (0, (0, []))
        assert engine.describe().memory == memory
        assert model.compiled.stats().pages.cached > 0
        engine.sleep()
        engine.wake()
        assert model.compiled.stats().pages.cached == 0, "texts whose pages are gone would be found"


def test_graphs_may_follow_the_pages_asleep(model, engine):
    expected = answers(engine)
    memory, objects = engine.describe().memory, device_objects(model)
    handles = begun(engine)
    assert engine.sleep() == memory["pages"]
    assert engine.sleep() == 0
    assert engine.sleep(graphs=True) == sum(memory.values()) - memory["pages"] - memory["weights"]
    assert alive(objects) == []
    engine.wake()
    assert results(handles) == answers(engine) == expected


def test_all_is_given_back_if_addresses_cannot_stay(monkeypatch, one_thread):
    """As with a CUDA driver that has no virtual memory management."""
    real = ReleasableMemory.__init__

    def without(memory: ReleasableMemory, device: torch.device) -> None:
        real(memory, device)
        memory.keeps_addresses = False

    monkeypatch.setattr(ReleasableMemory, "__init__", without)
    model = wrapped(**PAGES)
    with Engine(model, max_num_seqs=8) as engine:
        expected, objects = answers(engine), device_objects(model)
        handles = begun(engine)
        engine.sleep()
        assert alive(objects) == []
        engine.wake()
        assert results(handles) == answers(engine) == expected


def test_a_loop_over_pages_that_are_given_back_is_refused_until_they_are_there(model, engine):
    expected = alone(model, PROMPTS[0], 6)
    loop = model.compiled.generate_loop()
    engine.sleep()
    with pytest.raises(RuntimeError, match=r"given back by sleep\(\)"):
        loop.admit([5], 1) and loop.step()
    loop.close()
    engine.wake()
    assert alone(model, PROMPTS[0], 6) == expected
    engine.close()
    assert_account_is_empty(model)


def test_pages_go_even_if_a_call_of_generate_waits_in_the_engine(model, engine):
    """Its cache, empty as it is, stays in HuggingFace's frames."""
    expected = alone(model, PROMPTS[0], 6)
    handles = begun(engine)
    with engine.paused():
        caller = start(lambda: alone(model, PROMPTS[0], 6))
        while len(engine._engine_thread.request_table) < 5 and not caller.done():
            pass
    pages = device_objects(model)["pages"]
    engine.sleep(graphs=True)
    assert caller.done() or pages() is None
    engine.wake()
    assert caller.result(PATIENCE) == expected
    assert results(handles)


def test_caches_that_others_hold_are_named(model, engine):
    expected = answers(engine)
    with torch.no_grad():
        held = model(torch.tensor([PROMPTS[0]])).past_key_values
        model(torch.tensor([[5]]), past_key_values=held)  # which puts it into pages
    handles = begun(engine)
    with pytest.raises(RuntimeError, match=r"caches hold 3 pages .*drop them or close\(\) them"):
        engine.sleep()
    assert not engine.asleep
    assert results(handles) == expected
    empty = model.compiled.new_cache()
    held.close()
    engine.sleep(graphs=True)
    engine.wake()
    for stale in (held, empty):
        with torch.no_grad(), pytest.raises(ValueError, match="PagedCache belongs to another model, or to this one"):
            model(torch.tensor([[5]]), past_key_values=stale)
    with pytest.raises(RuntimeError, match=r"given back by sleep\(\)"):
        stale.generate_loop.admit([5], 1) and stale.generate_loop.step()


# ---- asleep


def test_what_needs_pages_is_refused_and_the_model_runs_as_huggingfaces(model, engine):
    expected = alone(model, PROMPTS[0], 6)
    engine.sleep()
    refused = [
        lambda: engine.submit([5]),
        lambda: engine.generate([5]),
        engine.warmup,
        engine.describe,
        model.compiled.warmup,
        model.compiled.new_cache,
        lambda: model.generate_batch([[5]], max_new_tokens=2),
    ]
    for call in refused:
        with pytest.raises(RuntimeError, match=r"is asleep, and has no pages; call (its )?wake\(\)"):
            call()
    assert alone(model, PROMPTS[0], 6) == expected
    with torch.no_grad():
        assert model(torch.tensor([PROMPTS[0]])).logits.shape == (1, 36, 128)
    assert model.compiled.stats().slow_paths == {"asleep": 1, "forward: asleep": 1}
    engine.reset_prefix_cache()
    assert engine.stats().pages is None
    engine.wake()
    assert alone(model, PROMPTS[0], 6) == expected
    assert [output.generated_tokens for output in model.generate_batch([PROMPTS[0]], max_new_tokens=6).values()] == [
        expected
    ]


def test_a_manager_that_is_kept_serves_again(model, engine):
    def batch() -> list[list[int]]:
        outputs = model.generate_batch(PROMPTS, max_new_tokens=6, do_sample=False, persistent_manager=True)
        return [outputs[name].generated_tokens for name in sorted(outputs)]

    expected = batch()
    assert all(map(len, expected))
    pages = device_objects(model)["pages"]
    engine.sleep(graphs=True)
    assert pages() is None
    with pytest.raises(RuntimeError, match="generate_batch: the model is asleep"):
        batch()
    engine.wake()
    assert batch() == expected
    model.destroy_cached_continuous_batching_manager()


def test_before_anything_was_done_and_twice(engine):
    assert engine.sleep() == 0
    assert engine.asleep
    engine.wake()
    expected = answers(engine)
    engine.wake()
    assert engine.sleep() > 0
    assert engine.sleep() == 0
    engine.wake()
    engine.wake()
    assert answers(engine) == expected


def test_impossible_moments_and_arguments(model, engine):
    with pytest.raises(ValueError, match="requests='drop': give 'park' or 'end'"):
        engine.sleep(requests="drop")
    refused: list[int] = []

    def stop(ids: object, scores: object) -> bool:
        with pytest.raises(RuntimeError, match="a call of the model is in progress in this thread"):
            engine.sleep()
        refused.append(1)
        return False

    model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False, stopping_criteria=[stop])
    assert len(refused) == 2


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["_current", "prepare", "take_again"])
def test_what_fails_to_wake_is_asleep_and_can_be_woken_again(monkeypatch, engine, place, kind):
    expected = answers(engine)
    handles = begun(engine)
    engine.sleep(graphs=place != "take_again")
    owners = {"_current": ModelRunnerLifecycle, "prepare": runner_lifecycle, "take_again": ReleasableMemory}
    with monkeypatch.context() as patch:

        def fail(*_: Any) -> None:
            raise kind("planted")

        patch.setattr(owners[place], place, fail)
        with pytest.raises(kind, match="planted"):
            engine.wake()
    assert engine.asleep
    engine.wake()
    assert results(handles) == expected


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("end", ["close", "unwrap"])
def test_a_model_is_as_before_once_its_engines_are_closed_or_it_is_unwrapped(weights_move, model, engine, end, weights):
    expected = alone(model, PROMPTS[0], 6)
    handles = begun(engine)
    engine.sleep()
    before = places(model)
    if weights:  # which may follow later
        engine.sleep(weights=True)
        with pytest.raises(RuntimeError, match="host memory"):
            alone(model, PROMPTS[0], 6)
    assert (places(model) != before) == weights
    if end == "unwrap":
        compiled_llm.unwrap(model)
    else:
        with Engine(model):
            engine.close()
            assert model.compiled.asleep  # the other one may wake it
        assert not model.compiled.asleep
    assert {handle.result(timeout=10).finish_reason for handle in handles if len(handle.requests) == 1} == {"cancelled"}
    assert alone(model, PROMPTS[0], 6) == expected
    assert end == "unwrap" or model.compiled.stats().slow_paths == {}


def test_a_model_whose_engine_is_forgotten_asleep_can_be_woken(model):
    engine = Engine(model)
    begun(engine)
    engine.sleep()
    del engine
    gc.collect()
    assert Engine(model).asleep
    Engine(model).wake()
    assert answers(Engine(model))


def test_a_model_that_has_changed_asleep_is_compiled_as_it_is(model, engine):
    answers(engine)
    engine.sleep()
    other = tiny(1)
    with torch.no_grad():
        model.load_state_dict(other.state_dict())
    model.double()
    engine.wake()
    assert alone(model, PROMPTS[0], 6) == alone(other.double(), PROMPTS[0], 6)


# ---- weights


@pytest.mark.parametrize("mode", ["eager", pytest.param("compile", marks=pytest.mark.whole)])
def test_weights_go_and_come_back_as_they_were(weights_move, one_thread, mode):
    model = wrapped(plain=tiny(tie_word_embeddings=True), mode=mode, fuse_projections=True)
    parameters = dict(model.named_parameters())
    parameters["model.norm.weight"].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    with Engine(model, max_num_seqs=8) as engine:
        expected, before, graphs = answers(engine), places(model), model.compiled.graphs
        groups = model.compiled.model_runner().graph_manager.weights.groups
        assert bool(groups) == (mode != "eager")
        handles = begun(engine)
        engine.sleep(weights=True)
        away = places(model)
        assert not set(before.values()) & set(away.values())
        for call in (lambda: alone(model, [5], 6), lambda: model(torch.tensor([[5]]))):
            with pytest.raises(RuntimeError, match=r"its weights are in host memory; call wake\(\)"):
                call()
        engine.wake()
        assert dict(model.named_parameters()) == parameters
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not parameters["model.norm.weight"].requires_grad
        assert results(handles) == answers(engine) == expected
        weights = model.compiled.model_runner().graph_manager.weights
        assert weights.laid_out
        assert weights.groups == groups
        assert (model.compiled.graphs, model.compiled.stats().recompiles) == (graphs, 0)
        loss = model(torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss
        loss.backward()
        optimizer.step()
        assert answers(engine) == expected


def test_weights_that_cannot_move_are_named_and_nothing_has_changed(weights_move, model, engine):
    class Packed(torch.nn.Parameter):
        pass

    expected = answers(engine)
    model.model.norm.weight.__class__ = Packed
    with pytest.raises(ValueError, match=r"weights=True: model\.norm\.weight is a Packed, .* leave weights=True out"):
        engine.sleep(weights=True)
    assert not engine.asleep
    model.model.norm.weight.__class__ = torch.nn.Parameter
    assert answers(engine) == expected


def test_on_a_cpu_weights_stay_where_they_are(model, engine):
    answers(engine)
    before = places(model)
    engine.sleep(weights=True)
    assert places(model) == before


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("moves", [False, True], ids=["pages", "weights"])
def test_requests_that_draft_go_on_after_it(
    moves: bool, monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, request: pytest.FixtureRequest
) -> None:
    """Steps whose lengths are bounds may be unread as it falls asleep; texts are there again when it wakes."""
    monkeypatch.setattr(Loop, "asynchronous", True)
    if moves:
        request.getfixturevalue("weights_move")
    few = [replace(own, allowed_token_ids=[5, 6, 7, 8]) for own in PARAMS]  # whose texts repeat themselves
    monkeypatch.setattr(sys.modules[__name__], "PARAMS", few)
    with Engine(model, max_num_seqs=8) as plain:
        expected = answers(plain)
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with Engine(model, max_num_seqs=8, speculative_config=config) as drafting:
        assert answers(drafting) == expected
        handles = begun(drafting)
        drafting.sleep(weights=moves)
        drafting.wake()
        assert results(handles) == expected
        drafts = drafting.stats().drafts
        assert drafts is not None
        assert 0 < drafts.accepted_tokens == sum(drafts.accepted_per_position) <= drafts.draft_tokens
    assert_account_is_empty(model)
