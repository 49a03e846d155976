"""CUDA graphs are captured once, kept within their budget and valid, on a CPU.

See ``support.execution.stand_in_cuda_graphs``. Programs are compiled only where that matters.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import compiled_llm
from compiled_llm import Engine, SamplingParams, WrapConfig
from compiled_llm.compilation.graphs import captured_shapes
from compiled_llm.compilation.graphs.captured_shapes import CapturedShapes
from compiled_llm.compilation.graphs.cuda_graphs import CudaGraphs
from compiled_llm.compilation.graphs.step_table import StepTable
from compiled_llm.execution.plans import Planner
from compiled_llm.execution.prefill.launches import PrefillLaunches
from compiled_llm.execution.prefill.packing import token_count
from compiled_llm.execution.state import prefill_room
from compiled_llm.execution.state.prefill_room import COMPILED_ROWS, compiled_length, typical_tokens
from compiled_llm.execution.steps.sampling_graphs import SamplingGraphs
from compiled_llm.model.sizes import weights_of_a_layer
from compiled_llm.model.version.model_version import ModelVersion
from support.execution.model_changes import (
    Changing,
    in_place,
    moved_data,
    new_parameter,
    other_attribute,
    swapped_module,
)
from support.execution.replaying import replayed
from support.execution.stand_in_cuda_graphs import (
    OPTIONS,
    NoGuards,
    StandIn,
    StandInGraphCapture,
    let_a_cpu_capture,
    one_layer,
    uncompiled,
)
from support.noting import note_calls
from support.parity import alone, assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import tiny_qwen3

SHAPES = CapturedShapes(max_rows=8, weights=1, max_row_tokens=1024, max_tokens=8192)


@pytest.fixture(autouse=True)
def cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    let_a_cpu_capture(monkeypatch)


def test_prefills_and_steps_are_captured_once_and_give_huggingfaces_tokens(seed, monkeypatch):
    """Also those that fill a shape, or nearly."""
    reference, model, shapes = one_layer(), uncompiled(monkeypatch), {*SHAPES.anchors()}
    batches = [5], [9, 4, 17], [9, 4, 17], [3, 3, 3, 20, 8], [16], [15], [17], [9, 7], [4, 4, 8], [5, 4, 4], [64]
    for lengths in batches:
        inputs = mixed_prompts(lengths, 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 12), greedy(reference, inputs, 12))
        shapes.add(SHAPES.smallest(sum(lengths), len(lengths)))
        assert model.compiled.stats().prefill_cuda_graphs == len(shapes)
    stats = model.compiled.stats()
    assert stats.buckets == [1, 2, 4, 8]
    assert (stats.cuda_graphs, stats.recompiles) == (4, 0)
    assert_account_is_empty(model)


def test_after_warmup_nothing_is_captured(seed, monkeypatch):
    model = uncompiled(monkeypatch)
    model.compiled.warmup([2])
    before = model.compiled.stats()
    assert before.cuda_graphs == 2, "the largest, too"
    assert before.prefill_cuda_graphs == len({*SHAPES.of(2), *SHAPES.anchors()})
    for lengths in ([5, 9], [40, 3], [1, 200]):
        greedy(model, mixed_prompts(lengths, 128, seed), 20)
    after = model.compiled.stats()
    assert (after.cuda_graphs, after.prefill_cuda_graphs) == (before.cuda_graphs, before.prefill_cuda_graphs)
    assert model.compiled.recaptures() == (0, [])


def test_prefills_whose_plans_do_not_fit_are_not_captured(seed, monkeypatch):
    monkeypatch.setattr(Planner, "fits", lambda self, shape: shape.tokens <= 48)
    reference, model = one_layer(), uncompiled(monkeypatch)
    model.compiled.warmup([1])
    before = model.compiled.stats()
    assert before.prefill_cuda_graphs == sum(shape.tokens <= 48 for shape in {*SHAPES.of(1), *SHAPES.anchors()}) > 0
    for length in (5, 200):
        inputs = mixed_prompts([length], 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 5), greedy(reference, inputs, 5))
    assert model.compiled.stats().prefill_cuda_graphs == before.prefill_cuda_graphs


MOVED = {
    new_parameter: ["lm_head.weight"],
    moved_data: ["model.layers.0.self_attn.k_proj.weight"],
    swapped_module: [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")],
}


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
@pytest.mark.drawn(most=1)
@pytest.mark.parametrize(
    "change",
    [new_parameter, other_attribute, moved_data, swapped_module, in_place],
    ids=lambda change: change.__name__,
)
def test_steps_of_a_model_that_changes_during_a_call_are_captured_again(change, seed):
    reference, model = one_layer(), compiled_llm.wrap(one_layer(), **OPTIONS)
    inputs = mixed_prompts([5, 18], 128, seed)
    before = greedy(model, inputs, 12)
    greedy(model, mixed_prompts([7], 128, seed), 12, streamer=Changing(lambda: change(model)))
    change(reference)
    expected = greedy(reference, inputs, 12)
    assert not torch.equal(expected, before)
    torch.testing.assert_close(greedy(model, inputs, 12), expected)
    again, weights = model.compiled.recaptures()
    assert (again > 0) == (change is not in_place)
    assert weights == MOVED.get(change, [])
    assert_account_is_empty(model)


def test_a_tensor_that_an_attribute_has_got_before_the_capture_is_watched(monkeypatch, seed):
    model, inputs = uncompiled(monkeypatch), mixed_prompts([5, 18], 128, seed)
    model.compiled.model_runner()
    model.model.later = torch.zeros(2)
    for _ in range(3):  # some are captured while others run
        greedy(model, inputs, 3)
    captured = model.compiled.cuda_graphs.captures
    greedy(model, inputs, 3)
    assert model.compiled.cuda_graphs.captures == captured
    model.model.later = torch.zeros(2)
    greedy(model, inputs, 3)
    assert model.compiled.cuda_graphs.captures > captured


@pytest.mark.whole
@pytest.mark.usefixtures("without_inductor")
def test_tokens_of_a_replay_whose_guards_turn_out_wrong_are_thrown_away_and_do_not_count_as_seen(monkeypatch, seed):
    reference, model = one_layer(), compiled_llm.wrap(one_layer(), **OPTIONS)
    inputs, penalty = mixed_prompts([5, 18], 128, seed), {"repetition_penalty": 30.0}

    def change() -> None:
        for changed in (model, reference):
            other_attribute(changed)

    before = greedy(model, inputs, 1)
    greedy(model, inputs, 1)  # replayed
    change()
    with monkeypatch.context() as patched:
        patched.setattr(StandIn, "launch", lambda self: None)  # a graph computes as before
        after = greedy(model, inputs, 1)
    torch.testing.assert_close(after, greedy(reference, inputs, 1))
    assert not torch.equal(after, before)
    greedy(model, inputs, 4, **penalty)
    change()
    torch.testing.assert_close(greedy(model, inputs, 4, **penalty), greedy(reference, inputs, 4, **penalty))


def count_looks(model: Any, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of the model, and of what each graph's program assumes."""
    looks: Counter[str] = Counter()
    note_calls(
        monkeypatch,
        ModelVersion,
        "begin_check",
        lambda version: looks.update(["model"] * (version is model.compiled.facts.version)),
    )
    note_calls(monkeypatch, NoGuards, "valid", lambda *_: looks.update(["graph"]))
    return looks


def test_bounded_cuda_graphs_make_room_and_are_captured_again(seed, monkeypatch):
    reference, model = one_layer(), uncompiled(monkeypatch, max_graphs=4)
    model.compiled.warmup([1, 2])
    assert model.compiled.cuda_graphs.ready == 4, "in preparing there is no room made for what may not be needed"
    for lengths in ([5], [9, 4, 17], [40], [3, 3, 3, 20, 8], [5], [9, 4, 17]):
        inputs = mixed_prompts(lengths, 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 24), greedy(reference, inputs, 24))
        assert model.compiled.cuda_graphs.ready <= 4
    table, stats = model.compiled.cuda_graphs, model.compiled.stats()
    assert table.evictions == table.captures - table.ready > 3
    assert (table.max_graphs, table.limit) == (4, None)
    assert table.captures == stats.cuda_graphs + stats.prefill_cuda_graphs
    assert [row["replays"] for row in stats.cuda_graph_table] == [row.replays for row in table]
    assert sum(row.replays for row in table if row.phase == "decode") > 6 * 20
    assert stats.buckets == sorted(row.rows for row in table if row.phase == "decode" and row.ready)
    assert (stats.recompiles, model.compiled.recaptures()) == (0, (0, []))
    assert_account_is_empty(model)


@pytest.mark.whole
def test_bounded_cuda_graphs_leave_their_outputs_in_one_buffer(seed, monkeypatch):
    model = uncompiled(monkeypatch, nbytes=2**30)
    model.compiled.warmup([1, 3])
    steps = model.compiled.model_runner().state.step_table
    outputs = [steps.get(key).cuda_graph.outputs for key in steps.of("decode", "prefill")]
    greedy(model, mixed_prompts([5, 9, 4], 128, seed), 3)
    with torch.no_grad():
        found = [replayed(steps.get(key).cuda_graph) for key in steps.of("decode")]
    places = {(own.logits.data_ptr(), own.tokens.data_ptr()) for own in found}
    assert len(outputs) > 4
    assert len(places) == 1


def test_memory_that_one_step_does_not_fit_into_is_refused_with_the_least(seed, monkeypatch):
    model = uncompiled(monkeypatch, nbytes=1000)
    inputs = mixed_prompts([5, 9], 128, seed)
    message = r"one step take \d+\.\d MiB .* limit is 0\.0 MiB; give at least graph_memory=\d+$"
    with pytest.raises(ValueError, match=message):
        greedy(model, inputs, 12)
    assert_account_is_empty(model)
    assert model.compiled.cuda_graphs.ready == 0


@pytest.mark.parametrize("watched", [False, True], ids=["without callbacks", "with a streamer"])
def test_a_call_looks_at_the_model_once_and_at_each_graph_once(watched, monkeypatch, seed):
    model = uncompiled(monkeypatch)
    options = {"streamer": Changing(lambda: None)} if watched else {}
    greedy(model, mixed_prompts([5, 18], 128, seed), 12)
    looks = count_looks(model, monkeypatch)
    greedy(model, mixed_prompts([5, 18], 128, seed), 12, **options)
    assert looks == ({"model": 12, "graph": 12} if watched else {"model": 1, "graph": 2})


@pytest.mark.parametrize("watched", [False, True])
def test_an_engine_looks_with_each_request_unless_told_not_to(watched, monkeypatch, seed):
    reference, model = one_layer(), uncompiled(monkeypatch)
    prompts = [mixed_prompts([length], 128, seed)["input_ids"][0].tolist() for length in (5, 18)]
    expected = [alone(reference, prompt, 6) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=6)
    with Engine(model, watch_model=watched) as engine:
        for prompt in prompts * 2:
            engine.generate(prompt, params)
        looks = count_looks(model, monkeypatch)
        assert [engine.generate(prompt, params)[0].token_ids for prompt in prompts] == expected
        if watched:
            assert looks["model"] >= 2
            assert looks["graph"] >= 4
        else:
            assert not looks


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
def test_captured_prefills_are_padded_little_and_to_whole_tiles(rows):
    shapes = CapturedShapes(64, weights=1, max_row_tokens=40_960, max_tokens=8192)
    for tokens in range(64, 4097):
        shape = shapes.smallest(tokens, rows)
        assert shape is not None
        assert shape.tokens >= tokens > shape.tokens * 3 // 4
        assert shape.tokens % 64 == 0 or shape.tokens < 128 or shape.tokens == 160
        assert shape in shapes.all()
    assert shapes.smallest(4097, rows) is None


def test_prefills_that_take_the_device_longer_than_the_host_are_not_captured():
    def most(hidden: int, intermediate: int, queries: int) -> int:
        weights = hidden * (2 * queries + 2 * 1024 + 3 * intermediate)
        return max(shape.tokens for shape in CapturedShapes(64, weights, max_row_tokens=40_960, max_tokens=8192).all())

    assert most(1024, 3072, 2048) == 4096  # Qwen3-0.6B: 9 ms there, 15 to 20 here
    assert most(4096, 12288, 4096) == 1280  # Qwen3-8B: 29 ms there, 19 here


def test_prefills_beyond_the_largest_shape_are_cut_as_long_as_the_host_is_the_slower_one() -> None:
    def shapes(hidden: int, intermediate: int, queries: int, max_tokens: int = 8192) -> CapturedShapes:
        weights = hidden * (2 * queries + 2 * 1024 + 3 * intermediate)
        return CapturedShapes(64, weights, 40_960, max_tokens, query_width=queries)

    def cut(of: CapturedShapes, rows: int, tokens: int) -> int | None:
        return of.cut(rows * tokens, rows * tokens * tokens // 2)

    small = shapes(1024, 3072, 2048)  # Qwen3-0.6B: 8,192 tokens take 15 ms there, 24 here; of one row 36 there
    assert [cut(small, *each) for each in ((1, 100), (32, 128), (33, 128), (64, 128))] == [None, None, 4096, 4096]
    assert [cut(small, *each) for each in ((48, 160), (16, 512), (4, 2048), (1, 8192))] == [4096, 4096, 4096, None]
    for larger in (shapes(2048, 6144, 2048), shapes(4096, 12288, 4096)):  # 1.7B and 8B
        assert not any(cut(larger, rows, 128) for rows in (10, 11, 32, 33, 64))
    assert cut(shapes(1024, 3072, 2048, max_tokens=2048), 16, 128) is None


def test_a_layer_too_large_for_any_shape_has_none() -> None:
    shapes = CapturedShapes(512, weights=855_000_000, max_row_tokens=40_960, max_tokens=8192)  # 70B
    assert (shapes.anchors(), shapes.of(512), shapes.largest, shapes.cut(8192, 8192)) == ([], [], None, None)


# of these rows' tokens, those in each launch; one token more than the largest shape has, rows that fill it, and others
CUT = [([33, 32], [64, 1]), ([16] * 8, [64, 64]), ([150], [64, 64, 22]), ([3, 90, 40], [64, 64, 5]), ([60, 4], [64])]


@pytest.fixture
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let no shape hold more than 64 tokens, and note the tokens of each launch of a prefill, without padding."""
    monkeypatch.setattr(captured_shapes, "CAPTURED_TOKENS", (16, 32, 64))
    return note_calls(monkeypatch, PrefillLaunches, "run", lambda self, chunk, *_: token_count(chunk.rows))


def test_a_prefill_that_no_shape_holds_runs_in_captured_ones(small_shapes, seed, monkeypatch) -> None:
    reference, model = one_layer(), uncompiled(monkeypatch)
    for lengths, launches in CUT:
        inputs = mixed_prompts(lengths, 128, seed)
        for _ in range(2):  # the first may find no graph
            small_shapes.clear()
            torch.testing.assert_close(greedy(model, inputs, 5), greedy(reference, inputs, 5))
            assert small_shapes == launches
    replays = sum(row.replays for row in model.compiled.cuda_graphs if row.phase == "prefill")
    assert replays >= sum(len(launches) for _, launches in CUT)
    assert model.compiled.stats().recompiles == 0
    assert_account_is_empty(model)


def test_what_is_never_captured_is_not_cut(small_shapes, seed, monkeypatch) -> None:
    reference, model = one_layer(), uncompiled(monkeypatch)
    inputs = mixed_prompts([90, 40], 128, seed)
    asked: list[dict[str, Any]] = [{}, {"logits_to_keep": 60}, {"logits_to_keep": 1, "output_hidden_states": True}]
    for options in asked:  # all logits would be there twice
        with torch.no_grad():
            ours, theirs = (each(**inputs, use_cache=False, **options).logits for each in (model, reference))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert small_shapes == [130] * 3
    few = uncompiled(monkeypatch, max_graphs=2)  # the largest shape does not stay
    greedy(few, inputs, 2)
    assert small_shapes[3:] == [130]


def test_an_engine_cuts_prefills_and_mixes_what_is_one_launch(small_shapes, seed, monkeypatch) -> None:
    reference, model = one_layer(), uncompiled(monkeypatch)
    prompts = [mixed_prompts([length], 128, seed)["input_ids"][0].tolist() for length in (150, 20, 70, 64)]
    with Engine(model, max_num_seqs=8, mixed=True) as engine:
        handles = [engine.submit(ids, SamplingParams(temperature=0, max_tokens=6)) for ids in prompts]
        assert [handle.result().token_ids for handle in handles] == [alone(reference, ids, 6) for ids in prompts]
    assert max(small_shapes) <= 64
    is_one_launch = model.compiled.model_runner().prefill.shapes.is_one_launch
    assert is_one_launch([1, 63], [10, 63])
    assert not is_one_launch([1, 64], [10, 64])
    assert_account_is_empty(model)


def test_the_weights_of_a_layer_are_its_matrices():
    model = tiny_qwen3(num_hidden_layers=2)
    layer = model.model.layers[0]
    expected = sum(child.weight.numel() for child in layer.modules() if isinstance(child, torch.nn.Linear))
    assert weights_of_a_layer(model, 2) == expected


def test_all_shapes_fit_into_a_few_of_at_most_four_times_their_tokens():
    for most in (1, 8, 64):
        shapes = CapturedShapes(most, weights=1, max_row_tokens=40_960, max_tokens=8192)
        anchors = shapes.anchors()
        assert len(anchors) <= 5
        assert set(anchors) <= set(shapes.all())
        for shape in shapes.all():
            larger = next(anchor for anchor in anchors if anchor.tokens >= shape.tokens and anchor.rows >= shape.rows)
            assert larger == anchors[0] or larger.tokens <= 4 * shape.tokens


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 64])
def test_shapes_have_room_for_the_rows_and_no_more_than_there_can_be(rows):
    for most in (rows, 64):
        shapes = CapturedShapes(most, weights=1, max_row_tokens=40_960, max_tokens=8192)
        assert all(rows <= shape.rows <= max(2, most) and shape.rows <= shape.tokens for shape in shapes.of(rows))


def test_a_few_tokens_beside_some_rows_are_not_padded_to_as_many_as_there_may_be_rows() -> None:
    shapes = CapturedShapes(256, weights=1, max_row_tokens=40_960, max_tokens=8192)
    for rows, tokens, padded in ((9, 24, 32), (17, 100, 128), (32, 192, 192), (32, 193, 256), (33, 40, 256)):
        shape = shapes.smallest(tokens, rows)
        assert shape is not None
        assert (shape.tokens, shape.rows) == (padded, 32 if padded < 256 else 256)
    assert len(set(shapes.all())) == len(shapes.all())


def test_a_prefill_whose_keys_are_split_is_captured_apart(seed, monkeypatch):
    monkeypatch.setattr(Planner, "schedules", (0, 1))
    monkeypatch.setattr(Planner, "schedule_for", lambda self, queries, lengths: int(lengths[0] > 30))
    monkeypatch.setattr(Planner, "fits", lambda self, shape: True)
    reference, model = one_layer(), uncompiled(monkeypatch)
    for length in (20, 40, 31):
        inputs = mixed_prompts([length], 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 5), greedy(reference, inputs, 5))
    others = len(SHAPES.anchors())
    assert model.compiled.stats().prefill_cuda_graphs == others + 3  # 32 tokens in both ways, 48 in one
    model.compiled.warmup([1])
    assert model.compiled.stats().prefill_cuda_graphs == others + 2 * len(SHAPES.of(1))
    assert model.compiled.recaptures() == (0, [])


def test_prefill_is_compiled_with_fewer_results_than_inductor_loops_from(monkeypatch):
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    layers = [SimpleNamespace(query_heads=heads) for heads in (16, 32)]
    assert typical_tokens(cast(Any, layers), torch.device("cuda")) == 263
    assert typical_tokens(cast(Any, layers), torch.device("cpu")) == 0


@pytest.mark.parametrize("max_positions", [4, 40, 100, 2048, 40960])
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_prefill_is_compiled_with_as_many_tokens_as_the_model_can_take(max_positions, page_size, monkeypatch):
    monkeypatch.setattr(prefill_room, "typical_tokens", lambda layers, device: 500)
    length = compiled_length([], torch.device("cuda"), max_positions, page_size)
    assert length >= 2
    if length > 2:
        assert COMPILED_ROWS * length <= min(500, max_positions)
    assert (length > 2) == (min(500, max_positions) >= COMPILED_ROWS * page_size)


def test_a_capture_that_fails_leaves_the_next_call_whole(monkeypatch, seed):
    reference, model = one_layer(), uncompiled(monkeypatch)
    inputs = mixed_prompts([5, 9], 128, seed)
    with monkeypatch.context() as patched:
        patched.setattr(StandInGraphCapture, "capture", lambda *_: (_ for _ in ()).throw(RuntimeError("no capture")))
        with pytest.raises(RuntimeError, match="no capture"):
            greedy(model, inputs, 12)
    assert_account_is_empty(model)
    torch.testing.assert_close(greedy(model, inputs, 12), greedy(reference, inputs, 12))
    assert_account_is_empty(model)


def test_cuda_graphs_go_with_the_last_reference():
    model = one_layer()
    steps = StepTable()
    cuda_graphs = CudaGraphs(model, WrapConfig(), model.device, steps)
    graphs = SamplingGraphs(SimpleNamespace(step_table=steps, device=model.device), captures=True)
    gone = weakref.ref(steps)
    gc.disable()
    try:
        del cuda_graphs, graphs, steps
        assert gone() is None, "their memory would stay until garbage is collected"
    finally:
        gc.enable()
