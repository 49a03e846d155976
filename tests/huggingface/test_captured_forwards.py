"""Calls of ``model(...)`` replay prefills that give the logits of all their tokens, on a CPU.

See ``support.execution.stand_in_cuda_graphs``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compiled_llm.execution.prefill import launches, shapes
from support.execution.replaying import replayed
from support.execution.stand_in_cuda_graphs import let_a_cpu_capture, one_layer, uncompiled
from support.parity import assert_account_is_empty, greedy, mixed_prompts

CALLS = launches._SEEN + 3


@pytest.fixture(autouse=True)
def cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    let_a_cpu_capture(monkeypatch)


@torch.no_grad()
def logits_of(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    out = model(**inputs, use_cache=False, **options).logits
    kept = options.get("logits_to_keep", 0)
    seen = inputs["attention_mask"][:, -kept:] != 0
    assert isinstance(out, Tensor)
    return out[seen]


def captured(model: Any, phase: str) -> dict[int, int]:
    """Replays of a phase's graphs, by tokens; without those that have none."""
    return {row.tokens: row.replays for row in model.compiled.cuda_graphs if row.phase == phase and row.replays}


@pytest.mark.drawn(most=2)
@pytest.mark.parametrize("lengths", [[5], [16], [9, 4, 17], [3, 3, 3, 20, 8], [64, 40]])
def test_logits_are_huggingfaces_before_and_after_the_capture(lengths, seed, monkeypatch):
    reference, model = one_layer(), uncompiled(monkeypatch)
    kept: list[tuple[Tensor, Tensor]] = []
    for call in range(CALLS):
        inputs = mixed_prompts(lengths, 128, seed + call)
        kept.append((logits_of(model, inputs), logits_of(reference, inputs)))
    for ours, theirs in kept:  # no call has overwritten what another returned
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    ((_, replays),) = captured(model, "scoring").items()
    assert replays == CALLS - launches._SEEN
    assert_account_is_empty(model)


def test_logits_of_the_last_tokens_come_from_prefills_as_answers_have_them(seed, monkeypatch):
    reference, model = one_layer(), uncompiled(monkeypatch)
    for call in range(CALLS):
        inputs = mixed_prompts([9, 4, 17], 128, seed + call)
        ours, theirs = (logits_of(each, inputs, logits_to_keep=1) for each in (model, reference))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert captured(model, "scoring") == {}
    assert captured(model, "prefill") == {32: CALLS}, "one of those in which others can run"


def test_all_shapes_leave_their_logits_in_one_place_and_answers_have_others(seed, monkeypatch):
    reference, model = one_layer(), uncompiled(monkeypatch)
    batches = [mixed_prompts([length], 128, seed) for length in (9, 30, 64)]
    for inputs in batches * CALLS:
        torch.testing.assert_close(logits_of(model, inputs), logits_of(reference, inputs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(greedy(model, batches[0], 12), greedy(reference, batches[0], 12))
    steps = model.compiled.model_runner().state.step_table
    graphs = model.compiled.cuda_graphs
    assert len(captured(model, "scoring")) == 3
    with torch.no_grad():
        places = {replayed(steps.get(key).cuda_graph).logits.data_ptr() for key in steps.of("prefill")}
    assert (
        model.compiled.model_runner().graph_manager.cuda_graphs._outputs["all logits"]._buffers[0].data_ptr()
        not in places
    )
    assert graphs.nbytes > 0


def test_few_of_many_logits_are_not_computed_for_all(seed, monkeypatch):
    model = uncompiled(monkeypatch)
    for call in range(CALLS):
        logits_of(model, mixed_prompts([60, 64], 128, seed + call), logits_to_keep=5)
    assert captured(model, "scoring") == {}


def test_no_more_is_captured_than_logits_may_take(seed, monkeypatch):
    monkeypatch.setattr(shapes, "_tokens_in", lambda state, part, nbytes: 32)
    model = uncompiled(monkeypatch)
    for lengths in ([20], [60]) * CALLS:
        logits_of(model, mixed_prompts(lengths, 128, seed))
    assert [*captured(model, "scoring")] == [32]


@pytest.mark.whole
def test_within_a_budget_they_make_room_for_answers(seed, monkeypatch):
    reference, model = one_layer(), uncompiled(monkeypatch, max_graphs=4)
    for lengths in ([9], [30], [64]) * CALLS:
        inputs = mixed_prompts(lengths, 128, seed)
        torch.testing.assert_close(logits_of(model, inputs), logits_of(reference, inputs), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(greedy(model, inputs, 3), greedy(reference, inputs, 3))
    graphs = list(model.compiled.cuda_graphs)
    assert len([row for row in graphs if row.state == "ready"]) <= 4
    scoring = [row for row in graphs if row.phase == "scoring"]
    assert any(row.captures for row in scoring)
    assert all(row.misses >= launches._SEEN * row.captures for row in scoring), "an evicted one is not captured at once"
