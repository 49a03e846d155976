"""A graph in pieces: what is left out runs each time, between the pieces that come before and after."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compiled_llm
from compiled_llm.compilation.graphs.piecewise import GraphInPieces
from compiled_llm_ops.attention import decode
from support.execution.stand_in_piecewise import CapturedPieces, Tape, captured, let_a_cpu_capture_pieces
from support.execution.two_layers import TwoLayers
from support.parity import assert_account_is_empty, greedy, mixed_prompts
from support.tiny_models import WINDOWS, tiny_qwen3

OPTIONS: dict[str, Any] = {
    "page_size": 4, "kv_memory": "3000 tokens", "max_batch_size": 8, "progress": False, "mode": "piecewise",
}  # fmt: skip


def test_a_replay_computes_what_a_launch_does_with_what_there_is_by_then(seed: int) -> None:
    layers = TwoLayers(seed)
    layers.step()
    graph, outputs = captured(layers.step)
    assert graph.pieces == 3
    for hidden in layers.inputs(3):
        for _ in range(3):
            layers.begin(hidden)
            expected = [layers.step() for _ in range(3)]
            expected_pages = [pages.clone() for pages in layers.pages]
            layers.begin(hidden)
            for launched in expected:
                graph.replay()
                torch.testing.assert_close(outputs, launched)
            torch.testing.assert_close(layers.pages, expected_pages)
            assert layers.lengths.tolist() == [4, 6]


def test_attention_is_called_at_each_replay_and_not_by_the_capture(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    calls: list[list[int]] = []
    monkeypatch.setattr(decode, "append", lambda args, _: calls.append(args.lengths.tolist()))
    layers = TwoLayers(seed)
    graph, _ = captured(layers.step)
    assert calls == []
    graph.replay()
    graph.replay()
    assert calls == [[1, 3]] * 2 + [[2, 4]] * 2


def test_after_a_capture_nothing_is_left_out_even_if_it_failed(seed: int) -> None:
    layers = TwoLayers(seed)

    def failing() -> None:
        layers.step()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        captured(failing)
    launched = layers.step()
    assert bool(launched[0].isfinite().all())
    graph, outputs = captured(layers.step)
    layers.begin(torch.ones_like(layers.hidden))
    expected = layers.step()
    layers.begin(torch.ones_like(layers.hidden))
    CapturedPieces(graph, outputs).launch()
    torch.testing.assert_close(outputs, expected)


def test_a_graph_without_anything_to_leave_out_is_one_piece() -> None:
    numbers = torch.arange(4.0)
    graph, doubled = captured(lambda: numbers * 2)
    numbers += 1
    graph.replay()
    assert (graph.pieces, doubled.tolist()) == (1, [2.0, 4.0, 6.0, 8.0])


class One(NamedTuple):
    number: Tensor


def test_each_piece_is_captured_with_the_same_options_and_reset() -> None:
    begun: list[tuple[Any, ...]] = []
    reset: list[Tape] = []

    class Noted(Tape):
        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            begun.append((args, kwargs))
            super().capture_begin()

        def reset(self) -> None:
            reset.append(self)

    graph = GraphInPieces(Noted)
    graph.capture_begin("pool", capture_error_mode="thread_local")
    graph.leave_out(lambda one: one.number * 2, One(torch.ones(2)), lambda one: torch.empty_like(one.number))
    graph.capture_end()
    assert begun == [(("pool",), {"capture_error_mode": "thread_local"})] * 2
    graph.reset()
    assert len(reset) == 2


# ---- whole models


def plain(**overrides: Any) -> PreTrainedModel:
    return tiny_qwen3(eos_token_id=None, **overrides)


@pytest.mark.drawn(most=1)
@pytest.mark.parametrize("layers", [{}, WINDOWS], ids=["full", "sliding"])
def test_steps_in_pieces_give_huggingfaces_tokens(
    layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    let_a_cpu_capture_pieces(monkeypatch)
    reference, model = plain(**layers), compiled_llm.wrap(plain(**layers), **OPTIONS)
    for lengths in [5], [9, 4, 17], [9, 4, 17], [3, 3, 3, 20, 8], [6]:
        inputs = mixed_prompts(lengths, 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 24), greedy(reference, inputs, 24))
    table = model.compiled.cuda_graphs
    assert table.captures == table.ready == 3 + 2 + 5  # and those that any prefill can run in
    assert all(row.replays > 0 for row in table if row.phase == "decode")
    ready = model.compiled.model_runner().state.step_table._ready
    pieces = {entry.cuda_graph.graph.pieces for entry in ready}
    assert pieces == {3}, "two layers"
    assert_account_is_empty(model)


def test_few_steps_in_pieces_make_room_for_each_other(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    let_a_cpu_capture_pieces(monkeypatch)
    reference, model = plain(), compiled_llm.wrap(plain(), **OPTIONS, max_graphs=2)
    for lengths in [5], [9, 4, 17], [40], [5]:
        inputs = mixed_prompts(lengths, 128, seed)
        torch.testing.assert_close(greedy(model, inputs, 12), greedy(reference, inputs, 12))
    assert model.compiled.cuda_graphs.ready == 2
    assert model.compiled.cuda_graphs.evictions >= 2
    assert_account_is_empty(model)
